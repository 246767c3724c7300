use std::fmt::Write as _;

use super::super::testing::GgufWriter;
use super::{GgmlType, GgufFile, ModelError};

/// One of each kind of value, and tensors of three types. The data ends with the file.
fn sample() -> GgufWriter {
    let mut nested = Vec::new();
    nested.extend(9_u32.to_le_bytes()); // an array of arrays
    nested.extend(2_u64.to_le_bytes());
    for values in [&[1_u8, 2][..], &[3]] {
        nested.extend(0_u32.to_le_bytes());
        nested.extend((values.len() as u64).to_le_bytes());
        nested.extend(values);
    }
    GgufWriter::new()
        .text("general.architecture", "llama")
        .u32("a.u32", 7)
        .f32("a.f32", 0.5)
        .bool("a.bool", true)
        .raw("a.u8", 0, &[200])
        .raw("a.i8", 1, &[200])
        .raw("a.u16", 2, &[1, 2])
        .raw("a.i16", 3, &[255, 255])
        .raw("a.u64", 10, &u64::MAX.to_le_bytes())
        .raw("a.i64", 11, &i64::MIN.to_le_bytes())
        .raw("a.f64", 12, &1.25_f64.to_le_bytes())
        .texts("a.texts", &["x", "", "ü"])
        .i32s("a.i32s", &[-1, 2])
        .f32s("a.f32s", &[1.5])
        .raw("a.nested", 9, &nested)
        .f32_tensor("norm", &[3], &[1.0, 2.0, 3.0])
        .tensor("q", GgmlType::Q4_1, &[64, 2], vec![7; 80])
        .tensor("last", GgmlType::F16, &[4, 2, 2, 1], vec![9; 32])
}

fn render(file: &GgufFile) -> String {
    let mut text = String::new();
    for key in file.metadata_keys() {
        let value = file.metadata(key).unwrap();
        write!(text, "{key} = {value}").unwrap();
        if let Some(array) = value.as_array() {
            for element in array.iter() {
                write!(text, " · {element}").unwrap();
                if let Some(inner) = element.as_array() {
                    write!(text, " {:?}", inner.iter().collect::<Vec<_>>()).unwrap();
                }
            }
        }
        text.push('\n');
    }
    for tensor in file.tensors() {
        let (name, dtype, shape) = (&tensor.name, tensor.dtype, &tensor.shape);
        let first = &file.data(tensor).unwrap()[..2];
        let (rows, bytes) = (tensor.rows(), tensor.bytes_len());
        writeln!(text, "{name}: {dtype} {shape:?}, {rows} rows, {bytes} bytes, {first:?}…")
            .unwrap();
    }
    text
}

/// Reads all that can be read, so that a place that was not checked would panic here.
fn read_all(file: &GgufFile) {
    let _ = render(file);
    for key in file.metadata_keys() {
        let _ = (file.u32(key), file.f32(key), file.bool(key), file.text(key), file.texts(key));
    }
}

#[test]
fn reads_what_was_written() {
    insta::assert_snapshot!(render(&GgufFile::from_bytes(sample().bytes()).unwrap()));
}

#[test]
fn every_cut_is_an_error_that_names_the_field() {
    let bytes = sample().bytes();
    let mut fields = Vec::new();
    for len in 0..bytes.len() {
        let error = GgufFile::from_bytes(bytes[..len].to_vec()).expect_err("it is cut");
        let field = match error {
            ModelError::CutOff { field, .. } => field,
            other => other.to_string(),
        };
        if fields.last() != Some(&field) {
            fields.push(field);
        }
    }
    insta::assert_snapshot!(fields.join("\n"));
}

#[test]
fn every_flipped_byte_is_an_error_or_a_file_that_can_be_read() {
    let bytes = sample().bytes();
    for at in 0..bytes.len() {
        for mask in [0x01, 0x10, 0x80, 0xff] {
            let mut flipped = bytes.clone();
            flipped[at] ^= mask;
            if let Ok(file) = GgufFile::from_bytes(flipped) {
                read_all(&file);
            }
        }
    }
}

fn head(version: u32, tensors: u64, keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(keys.to_le_bytes());
    bytes.extend(rest.concat());
    bytes
}

fn check_refused(cases: &[(&str, Vec<u8>)]) -> String {
    let mut text = String::new();
    for (name, bytes) in cases {
        let error = GgufFile::from_bytes(bytes.clone()).expect_err(name);
        writeln!(text, "{name}: {error}").unwrap();
    }
    text
}

#[test]
fn a_lying_header_is_refused() {
    let key = [&1_u64.to_le_bytes()[..], b"k"].concat();
    let array = |element: u32, count: u64| {
        [&9_u32.to_le_bytes()[..], &element.to_le_bytes(), &count.to_le_bytes()].concat()
    };
    let nested: Vec<u8> = (0..10_000).flat_map(|_| array(9, 1)[4..].to_vec()).collect();
    let nested = [&9_u32.to_le_bytes()[..], &nested].concat();
    let sized = |len: u64| len.to_le_bytes();
    let pad = [0_u8; 64];
    let cases = [
        ("not gguf", b"\x80\x02}q\x00".to_vec()),
        ("empty", Vec::new()),
        ("version 1", head(1, 0, 0, &[])),
        ("version 4", head(4, 0, 0, &[])),
        ("big endian", head(3_u32.swap_bytes(), 0, 0, &[])),
        ("key of 2^32 bytes", head(3, 0, 1, &[&sized(1 << 32), &pad])),
        ("key of 2^64 - 1 bytes", head(3, 0, 1, &[&sized(u64::MAX), &pad])),
        ("key not UTF-8", head(3, 0, 1, &[&sized(1), &[0xff], &pad])),
        ("2^40 keys", head(3, 0, 1 << 40, &[&pad])),
        ("2^40 tensors", head(3, 1 << 40, 0, &[&pad])),
        ("2^63 tensors", head(3, 1 << 63, 0, &[&pad])),
        ("2^61 bytes", head(3, 0, 1, &[&key, &array(0, 1 << 61), &pad])),
        ("2^61 doubles", head(3, 0, 1, &[&key, &array(12, 1 << 61), &pad])),
        ("2^61 texts", head(3, 0, 1, &[&key, &array(8, 1 << 61), &pad])),
        ("10,000 deep", head(3, 0, 1, &[&key, &nested])),
        ("unknown value type", head(3, 0, 1, &[&key, &13_u32.to_le_bytes(), &pad])),
        ("unknown element type", head(3, 0, 1, &[&key, &array(99, 0), &pad])),
        ("same key twice", GgufWriter::new().u32("k", 1).u32("k", 1).bytes()),
        ("alignment 0", GgufWriter::new().u32("general.alignment", 0).bytes()),
        ("alignment 24", GgufWriter::new().u32("general.alignment", 24).bytes()),
        ("alignment as text", GgufWriter::new().text("general.alignment", "32").bytes()),
    ];
    insta::assert_snapshot!(check_refused(&cases));
}

/// A file of one tensor, with the bytes of its offset in the header replaced.
fn with_offset(offset: u64) -> Vec<u8> {
    let mut bytes = GgufWriter::new().f32_tensor("t", &[8], &[0.0; 8]).bytes();
    // The header ends with the offset, here at 24 + 8 + 1 + 4 + 8 + 4.
    bytes[49..57].copy_from_slice(&offset.to_le_bytes());
    bytes
}

#[test]
fn a_tensor_that_cannot_be_is_refused() {
    let one = |type_id: u32, shape: &[u64]| {
        GgufWriter::new().raw_tensor("t", type_id, shape, vec![0; 64]).bytes()
    };
    let mut same_place = GgufWriter::new().f32_tensor("a", &[16], &[0.0; 16]);
    same_place = same_place.f32_tensor("b", &[16], &[0.0; 16]);
    let mut same_place = same_place.bytes();
    // The second entry is the last 33 bytes of a header of 90, its offset the last 8 of those.
    same_place[82..90].copy_from_slice(&32_u64.to_le_bytes());
    let twice = GgufWriter::new().f32_tensor("a", &[8], &[0.0; 8]).f32_tensor("a", &[8], &[0.0; 8]);
    let cases = [
        ("offset past the end", with_offset(1 << 20)),
        ("offset at the end", with_offset(32)),
        ("offset 2^64 - 32", with_offset(u64::MAX - 31)),
        ("offset not aligned", with_offset(4)),
        ("unknown type, wrong offset", one(77, &[1 << 40])),
        ("a type not read", one(20, &[32])),
        ("no dimensions", one(0, &[])),
        ("five dimensions", one(0, &[1, 1, 1, 1, 1])),
        ("a dimension of 0", one(0, &[4, 0])),
        ("half a block", one(2, &[33])),
        ("2^64 elements", one(24, &[1 << 32, 1 << 32])),
        ("2^65 bytes", one(28, &[1 << 62])),
        ("2^33 elements, 64 bytes", one(24, &[1 << 17, 1 << 16])),
        ("overlap", same_place),
        ("same name", twice.bytes()),
    ];
    insta::assert_snapshot!(check_refused(&cases));
}

#[test]
fn sizes_over_4_gib_are_not_cut_short() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.gguf");
    let rows = (1_u64 << 32) / 32 + 1;
    let header = GgufWriter::new().raw_tensor("t", GgmlType::Q8_0.id(), &[32, rows], Vec::new());
    let header = header.bytes();
    // The data is a hole in the file: it costs no disk.
    std::fs::write(&path, &header).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let whole = header.len() as u64 + rows * 34;
    file.set_len(whole).unwrap();
    let opened = GgufFile::open(&path).unwrap();
    assert_eq!(opened.data(&opened.tensors()[0]).unwrap().len() as u64, rows * 34);
    file.set_len(whole - 1).unwrap();
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("large.gguf: the file ends inside tensor \"t\""), "{error}");
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, sample().bytes()).unwrap();
    let opened = GgufFile::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    let error = opened.data(opened.tensor("last").unwrap()).unwrap_err();
    assert!(matches!(error, ModelError::Changed { now_bytes: 100, .. }), "{error}");
}

#[test]
fn a_folder_or_a_missing_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = GgufFile::open(folder.path()).unwrap_err();
    assert!(matches!(error, ModelError::NotAFile { .. }), "{error}");
    let error = GgufFile::open(&folder.path().join("none.gguf")).unwrap_err();
    assert!(matches!(error, ModelError::Read { .. }), "{error}");
}
