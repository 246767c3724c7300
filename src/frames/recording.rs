//! Recordings: a first line that names the format, then records, each behind its length.

use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use pawl_shared::tap::{Direction, TapRecord};

const MAGIC: &[u8] = b"pawl frames 1\n";

/// Longest record that is read: a message of 64 MiB and its map.
const RECORD_BYTES_MAX: u32 = 65 << 20;

pub struct Writer(BufWriter<std::fs::File>);

impl Writer {
    /// A new file; one that exists is not written over.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        let mut file = BufWriter::new(std::fs::File::create_new(path)?);
        file.write_all(MAGIC)?;
        Ok(Self(file))
    }

    /// Appends `record`; it is in the file when this returns.
    pub fn write(&mut self, record: &TapRecord) -> anyhow::Result<()> {
        let bytes = record.encode();
        let length = u32::try_from(bytes.len()).context("a message of over 4 GiB")?;
        self.0.write_all(&length.to_le_bytes())?;
        self.0.write_all(&bytes)?;
        Ok(self.0.flush()?)
    }
}

pub struct Reader<R> {
    input: BufReader<R>,
    number: u64,
    broken: bool,
}

impl<R: Read> Reader<R> {
    pub fn new(input: R) -> anyhow::Result<Self> {
        let mut input = BufReader::new(input);
        let mut magic = [0; MAGIC.len()];
        let whole = input.read_exact(&mut magic).is_ok();
        ensure!(
            whole && magic == MAGIC,
            "not a recording of `pawl frames` (for hexadecimal lines say --hex)"
        );
        Ok(Self { input, number: 0, broken: false })
    }

    fn read(&mut self) -> anyhow::Result<Option<TapRecord>> {
        let mut length = [0; 4];
        match self.input.read(&mut length[..1])? {
            0 => return Ok(None),
            _ => self.input.read_exact(&mut length[1..]).context("cut off in a length")?,
        }
        let length = u32::from_le_bytes(length);
        ensure!(length <= RECORD_BYTES_MAX, "announces {length} bytes");
        let mut bytes = Vec::new();
        let got = self.input.by_ref().take(u64::from(length)).read_to_end(&mut bytes)?;
        if got < length as usize {
            bail!("cut off after {got} of {length} bytes");
        }
        Ok(Some(TapRecord::decode(&bytes)?))
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
    let direction = if to_core { Direction::ToCore } else { Direction::ToClient };
    Ok(TapRecord { at: 0.0, client: 0, direction, frames, missed: 0 })
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

    fn recorded() -> (tempfile::TempDir, Vec<TapRecord>, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.frames");
        let record = |client| TapRecord {
            at: 1.0,
            client,
            direction: Direction::ToCore,
            frames: vec![Bytes::from_static(b"\x01"), Bytes::from_static(b"\x91\xa1a")],
            missed: 0,
        };
        let records = vec![record(0), record(1)];
        let mut writer = Writer::create(&path).unwrap();
        records.iter().for_each(|r| writer.write(r).unwrap());
        let bytes = std::fs::read(&path).unwrap();
        (folder, records, bytes)
    }

    #[test]
    fn a_recording_reads_back() {
        let (_folder, records, bytes) = recorded();
        let read: Vec<_> = Reader::new(&bytes[..]).unwrap().map(Result::unwrap).collect();
        assert_eq!(read, records);
    }

    #[test]
    fn a_cut_recording_gives_whole_records_then_an_error() {
        let (_folder, records, bytes) = recorded();
        for end in MAGIC.len() + 1..bytes.len() {
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
        assert!(from_hex_line("0g").is_err());
        assert!(from_hex_line("012").is_err());
    }
}
