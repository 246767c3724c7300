//! Every message as bytes, as a dynamic value and as Debug. A snapshot that changes is a wire that
//! changes: look at it with vLLM's definitions beside it.

use super::hex;
use super::samples::{self, Sample};
use crate::protocol::{Value, dump};

fn rendered(sample: &Sample) -> String {
    let mut text = String::new();
    for (index, frame) in sample.frames.iter().enumerate() {
        text.push_str(&format!("frame {index}: {}\n", hex(frame)));
    }
    match dump(&sample.frames[sample.payload]) {
        Ok(value) => text.push_str(&format!("\nvalue: {}\n", value.to_json())),
        Err(error) => text.push_str(&format!("\nno msgpack: {error}\n")),
    }
    text.push_str(&format!("\ndecoded: {}\n", (sample.decode)(&sample.frames).unwrap()));
    text
}

#[test]
fn every_message() {
    for sample in samples::all() {
        insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
            insta::assert_snapshot!(sample.name, rendered(&sample));
        });
    }
}

/// Another reader of msgpack sees the same values in our bytes, so that writer and reader here
/// cannot be wrong together.
#[test]
fn another_reader_agrees() {
    for sample in samples::all().iter().filter(|sample| sample.name != "dead") {
        let payload = &sample.frames[sample.payload];
        let theirs = rmpv::decode::read_value(&mut &payload[..]).unwrap();
        assert_eq!(from_rmpv(&theirs), dump(payload).unwrap(), "{}", sample.name);
    }
}

fn from_rmpv(value: &rmpv::Value) -> Value {
    match value {
        rmpv::Value::Nil => Value::Nil,
        rmpv::Value::Boolean(value) => Value::Bool(*value),
        rmpv::Value::Integer(value) => match value.as_u64() {
            Some(value) => value.into(),
            None => value.as_i64().unwrap().into(),
        },
        rmpv::Value::F32(value) => (*value).into(),
        rmpv::Value::F64(value) => (*value).into(),
        rmpv::Value::String(text) => text.as_str().unwrap().into(),
        rmpv::Value::Binary(bytes) => bytes.clone().into(),
        rmpv::Value::Array(values) => values.iter().map(from_rmpv).collect(),
        rmpv::Value::Map(pairs) => Value::Map(
            pairs.iter().map(|(key, value)| (from_rmpv(key), from_rmpv(value))).collect(),
        ),
        rmpv::Value::Ext(kind, bytes) => Value::Ext(*kind, bytes.clone()),
    }
}
