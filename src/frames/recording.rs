//! Recordings: a line that names the format and its version, a header, then records. Header and
//! records are msgpack maps, each behind its length in four bytes, little-endian. docs/frames.md
//! describes it.

use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::protocol::{Value, decode_value, encode_value};
use pawl_shared::tap::{Passed, TapRecord};

/// The first line, up to the version.
const MAGIC: &str = "pawl frames ";
const VERSION: u32 = 1;
/// Bytes of the first line; another version's may be longer.
const LINE_BYTES_MAX: u64 = 32;

/// Longest record that is read: a message of 64 MiB and its map.
const RECORD_BYTES_MAX: u32 = 65 << 20;

pub struct Writer {
    file: BufWriter<std::fs::File>,
    bytes: u64,
}

impl Writer {
    /// A new file for what passes at `source`; one that exists is not written over.
    pub fn create(path: &Path, source: &str) -> anyhow::Result<Self> {
        let file = BufWriter::new(std::fs::File::create_new(path)?);
        let mut writer = Self { file, bytes: 0 };
        writer.put(format!("{MAGIC}{VERSION}\n").as_bytes())?;
        let header = Value::map([
            ("pawl", Value::from(env!("CARGO_PKG_VERSION"))),
            ("source", Value::from(source)),
            ("began", Value::Float(SystemClock.wall().0)),
        ]);
        writer.put_behind_length(&encode_value(&header))?;
        Ok(writer)
    }

    /// Appends `record`; it is in the file when this returns.
    pub fn write(&mut self, record: &TapRecord) -> anyhow::Result<()> {
        self.put_behind_length(&record.encode())
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn put_behind_length(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let length = u32::try_from(bytes.len()).context("a message of over 4 GiB")?;
        self.put(&length.to_le_bytes())?;
        self.put(bytes)?;
        Ok(self.file.flush()?)
    }

    fn put(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.bytes += bytes.len() as u64;
        Ok(self.file.write_all(bytes)?)
    }
}

pub struct Reader<R> {
    input: BufReader<R>,
    header: Value,
    number: u64,
    broken: bool,
}

impl<R: Read> Reader<R> {
    pub fn new(input: R) -> anyhow::Result<Self> {
        let mut input = BufReader::new(input);
        let mut line = Vec::new();
        input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        let line = String::from_utf8_lossy(&line);
        let Some(version) = line.strip_prefix(MAGIC).and_then(|rest| rest.strip_suffix('\n'))
        else {
            bail!("not a recording of `pawl frames` (for hexadecimal lines say --hex)");
        };
        ensure!(
            version == VERSION.to_string(),
            "a recording of version {version}; this build reads version {VERSION}"
        );
        let mut reader = Self { input, header: Value::Nil, number: 0, broken: false };
        let header = reader.read_bytes().context("the header")?.context("the header is missing")?;
        reader.header = decode_value(&header).context("the header")?;
        Ok(reader)
    }

    /// Where and when it was recorded, for people.
    pub fn about(&self) -> String {
        let text = |key| self.header.get(key).and_then(Value::as_str).unwrap_or("?");
        let began = self.header.get("began").and_then(Value::as_f64).unwrap_or_default();
        format!("recorded by pawl {} from {} at {began:.0}", text("pawl"), text("source"))
    }

    fn read_bytes(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let mut length = [0; 4];
        match self.input.read(&mut length[..1])? {
            0 => return Ok(None),
            _ => self.input.read_exact(&mut length[1..]).context("cut off in a length")?,
        }
        let length = u32::from_le_bytes(length);
        ensure!(length <= RECORD_BYTES_MAX, "announces {length} bytes, which no record has");
        let mut bytes = Vec::new();
        let got = self.input.by_ref().take(u64::from(length)).read_to_end(&mut bytes)?;
        if got < length as usize {
            bail!("cut off after {got} of {length} bytes");
        }
        Ok(Some(bytes))
    }

    fn read(&mut self) -> anyhow::Result<Option<TapRecord>> {
        Ok(self.read_bytes()?.map(|bytes| TapRecord::decode(&bytes)).transpose()?)
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = anyhow::Result<TapRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.broken {
            return None;
        }
        self.number += 1;
        let record = self.read().with_context(|| format!("record {}", self.number)).transpose();
        self.broken = matches!(record, Some(Err(_)));
        record
    }
}

/// Messages typed as hexadecimal, one a line. With a type byte as first frame (`00 …`) it goes to
/// the core; a single frame comes from it.
pub struct HexLines<R>(std::io::Lines<BufReader<R>>);

impl<R: Read> HexLines<R> {
    pub fn new(input: R) -> Self {
        Self(BufReader::new(input).lines())
    }
}

impl<R: Read> Iterator for HexLines<R> {
    type Item = anyhow::Result<TapRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = loop {
            match self.0.next()? {
                Ok(line) if line.trim().is_empty() => {}
                Ok(line) => break line,
                Err(error) => return Some(Err(error.into())),
            }
        };
        Some(from_hex_line(&line))
    }
}

fn from_hex_line(line: &str) -> anyhow::Result<TapRecord> {
    let frames: anyhow::Result<Vec<Bytes>> = line.split_whitespace().map(from_hex).collect();
    let frames = frames?;
    let to_core = frames.len() > 1 && frames[0].len() == 1;
    let passed = if to_core { Passed::ToCore(frames) } else { Passed::ToClient(frames) };
    Ok(TapRecord { at: 0.0, client: 0, epoch: None, missed: 0, passed })
}

fn from_hex(text: &str) -> anyhow::Result<Bytes> {
    ensure!(text.len().is_multiple_of(2), "an odd number of hexadecimal digits");
    let digit = |c: u8| (c as char).to_digit(16).context("not a hexadecimal digit");
    let byte = |pair: &[u8]| Ok((digit(pair[0])? * 16 + digit(pair[1])?) as u8);
    text.as_bytes().chunks(2).map(byte).collect::<anyhow::Result<Vec<u8>>>().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded() -> (tempfile::TempDir, Vec<TapRecord>, Vec<u8>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.frames");
        let frames = vec![Bytes::from_static(b"\x01"), Bytes::from_static(b"\x91\xa1a")];
        let record = |client| TapRecord {
            at: 1.0,
            client,
            epoch: Some(5),
            missed: 0,
            passed: Passed::ToCore(frames.clone()),
        };
        let records = vec![record(0), record(1)];
        let mut writer = Writer::create(&path, "ipc:///core").unwrap();
        let header = writer.bytes() as usize;
        records.iter().for_each(|r| writer.write(r).unwrap());
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(writer.bytes(), bytes.len() as u64);
        assert!(Writer::create(&path, "x").is_err(), "it would be written over");
        (folder, records, bytes, header)
    }

    #[test]
    fn a_recording_reads_back() {
        let (_folder, records, bytes, _) = recorded();
        let reader = Reader::new(&bytes[..]).unwrap();
        assert!(reader.about().contains("from ipc:///core"), "{}", reader.about());
        assert_eq!(reader.map(Result::unwrap).collect::<Vec<_>>(), records);
    }

    #[test]
    fn a_cut_recording_gives_whole_records_then_an_error() {
        let (_folder, records, bytes, header) = recorded();
        for end in 0..header {
            assert!(Reader::new(&bytes[..end]).is_err(), "cut at {end}");
        }
        for end in header + 1..bytes.len() {
            let read: Vec<_> = Reader::new(&bytes[..end]).unwrap().collect();
            let whole = read.iter().filter(|r| r.is_ok()).count();
            assert!(whole < records.len());
            let first_is_whole = read.len() == 1 && whole == 1;
            assert!(first_is_whole || read.last().is_some_and(Result::is_err), "cut at {end}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        assert!(Reader::new(&b"something else entirely"[..]).is_err());
        let other = Reader::new(&b"pawl frames 9\n"[..]).err().unwrap().to_string();
        assert!(other.contains("version 9") && other.contains("version 1"), "{other}");
        let mut huge = recorded().2;
        huge.extend(u32::MAX.to_le_bytes());
        let last = Reader::new(&huge[..]).unwrap().last().unwrap().unwrap_err();
        assert!(format!("{last:#}").contains("no record has"), "{last:#}");
        assert!(from_hex_line("0g").is_err());
        assert!(from_hex_line("012").is_err());
    }
}
