//! Damaged messages: an error or another valid message, never a panic, and never much memory.

use allocation_counter::measure;
use bytes::Bytes;

use super::samples::{self, Sample};
use super::unhex;
use crate::protocol::*;

/// What decoding may have allocated at once, for a message of `len` bytes. The smallest output is 3
/// bytes on the wire and some 700 decoded, so that a flipped length makes some of it.
fn memory_max(len: usize) -> u64 {
    64 * 1024 + 300 * len as u64
}

fn check(sample: &Sample, frames: &[Bytes], what: &str) {
    let len = frames.iter().map(Bytes::len).sum();
    // The decoded message is dropped inside, so that its Debug text is not counted: damage that
    // still decodes is another message, and says nothing more here.
    let used = measure(|| drop(decode(sample, frames)));
    assert!(
        used.bytes_max <= memory_max(len),
        "{}, {what}: {} bytes allocated for {len}",
        sample.name,
        used.bytes_max
    );
}

fn decode(sample: &Sample, frames: &[Bytes]) -> Result<(), DecodeError> {
    match sample.name {
        "hello" => EngineHello::decode(&frames[0]).map(drop),
        "init" => HandshakeInit::decode(&frames[0]).map(drop),
        "ready_response" => ReadyResponse::decode(&frames[0]).map(drop),
        "value" => decode_value(&frames[0]).map(drop),
        _ if sample.payload == 1 => ClientMessage::decode(frames).map(drop),
        _ => EngineMessage::decode(frames).map(drop),
    }
}

#[test]
fn cut_after_each_byte() {
    for sample in samples::all() {
        let payload = sample.frames[sample.payload].clone();
        for len in 0..payload.len() {
            let mut frames = sample.frames.clone();
            frames[sample.payload] = payload.slice(..len);
            check(&sample, &frames, "cut");
            let error = decode(&sample, &frames).expect_err("half a message");
            assert_ne!(error.message, "", "{}", sample.name);
        }
    }
}

#[test]
fn each_bit_flipped_and_each_byte_replaced() {
    let masks = (0..8).map(|bit| 1 << bit).chain([0xff]);
    for sample in samples::all() {
        for (index, frame) in sample.frames.iter().enumerate() {
            for at in 0..frame.len() {
                for mask in masks.clone() {
                    let mut bytes = frame.to_vec();
                    bytes[at] ^= mask;
                    let mut frames = sample.frames.clone();
                    frames[index] = bytes.into();
                    check(&sample, &frames, &format!("frame {index}, byte {at} ^ {mask:#x}"));
                }
            }
        }
    }
}

#[test]
fn each_frame_missing_or_cut_short() {
    for sample in samples::all() {
        for keep in 0..sample.frames.len() {
            if sample.frames.len() > 1 {
                decode(&sample, &sample.frames[..keep]).expect_err("frames are missing");
            }
            let mut frames = sample.frames.clone();
            frames[keep] = frames[keep].slice(..frames[keep].len() / 2);
            decode(&sample, &frames).expect_err("a frame is cut");
        }
    }
}

#[test]
fn bytes_after_the_message() {
    for sample in samples::all().iter().filter(|sample| sample.name != "dead") {
        let mut frames = sample.frames.clone();
        let payload = &sample.frames[sample.payload];
        frames[sample.payload] = [payload, &[0xc0][..]].concat().into();
        assert_eq!(decode(sample, &frames).unwrap_err().kind, DecodeErrorKind::Trailing);
    }
}

/// Every way into the decoder, over one payload.
fn every_decoder(payload: &[u8]) -> Vec<Result<(), DecodeError>> {
    let frame = Bytes::copy_from_slice(payload);
    let client =
        |type_byte: u8| ClientMessage::decode(&[vec![type_byte].into(), frame.clone()]).map(drop);
    vec![
        client(0),
        client(1),
        client(2),
        client(3),
        EngineMessage::decode(std::slice::from_ref(&frame)).map(drop),
        EngineHello::decode(payload).map(drop),
        HandshakeInit::decode(payload).map(drop),
        ReadyResponse::decode(payload).map(drop),
        decode_value(payload).map(drop),
        dump(payload).map(drop),
    ]
}

/// `payload` is refused everywhere, for less than 64 KiB beside its own size.
fn check_bomb(payload: &[u8]) {
    let used = measure(|| {
        for (index, result) in every_decoder(payload).into_iter().enumerate() {
            result.expect_err(&format!("decoder {index}"));
        }
    });
    // Each decoder of frames is given a copy.
    assert!(used.bytes_max <= 64 * 1024 + 64 * payload.len() as u64, "{used:?}");
}

#[test]
fn lengths_that_announce_four_billion() {
    for head in ["dd", "df", "db", "c6", "c9"] {
        check_bomb(&unhex(&format!("{head}ffffffff")));
        // The same where lists of each sort are due.
        for before in ["9900", "92a27231", "81a57061776c", "8183706177", "990090", "9400cf"] {
            check_bomb(&unhex(&format!("{before}{head}ffffffff")));
        }
    }
}

#[test]
fn ten_thousand_levels() {
    for (level, last) in [("91", "c0"), ("81a161", "c0"), ("9900", "c0"), ("81", "c0")] {
        check_bomb(&unhex(&(level.repeat(10_000) + last)));
    }
    // And where a value is passed over.
    let unknown_key = format!("81a3787878{}c0", "91".repeat(10_000));
    check_bomb(&unhex(&unknown_key));
}

/// Nothing is announced that is not there, and yet it would fill the memory: small values that are
/// large once decoded, and one frame named over and over.
#[test]
fn true_lengths_that_would_fill_the_memory() {
    let outputs = 1_000_000_u32;
    let mut payload = unhex("9900dd").to_vec();
    payload.extend(outputs.to_be_bytes());
    payload.extend(unhex("92a090").repeat(outputs as usize));
    payload.extend(unhex("c0cb4000000000000000c0c0c0c0c0"));
    let frames = [payload.into()];
    let used = measure(|| {
        let error = EngineMessage::decode(&frames).unwrap_err();
        assert_eq!(error.kind, DecodeErrorKind::TooLarge, "{error}");
    });
    assert!(used.bytes_max < 300 << 20, "{used:?}");

    // 4 MiB of ids that 200 outputs name in 30 bytes each.
    let ids: Bytes = vec![0_u8; 4 << 20].into();
    let tensor = |dtype: &str| format!("93a3{dtype}9201ce0010000001");
    let logprobs =
        format!("93{}{}93a33c69389101d70301000000 00000000", tensor("3c6934"), tensor("3c6634"));
    let output = format!("93a090{logprobs}");
    let payload = unhex(&format!("9300dc00c8{}c0", output.repeat(200)));
    let frames = [payload, ids];
    let used = measure(|| {
        let error = EngineMessage::decode(&frames).unwrap_err();
        assert_eq!(error.kind, DecodeErrorKind::TooLarge, "{error}");
    });
    assert!(used.bytes_max < 300 << 20, "{used:?}");
}
