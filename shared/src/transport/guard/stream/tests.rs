use proptest::prelude::*;

use super::*;

const SMALL: Limits = Limits { frame_bytes: 1000, message_bytes: 1500, frames: 3, ..Limits::DATA };

fn greeting() -> Vec<u8> {
    let mut bytes = vec![0; GREETING_BYTES];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn command(name: &str, properties: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = vec![name.len() as u8];
    body.extend(name.bytes());
    for (name, value) in properties {
        body.push(name.len() as u8);
        body.extend(name.bytes());
        body.extend((value.len() as u32).to_be_bytes());
        body.extend(*value);
    }
    frame(COMMAND, &body)
}

/// With a length of one byte where that is enough, as peers write it.
fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = match u8::try_from(body.len()) {
        Ok(length) => vec![flags, length],
        Err(_) => header(flags, body.len() as u64),
    };
    bytes.extend(body);
    bytes
}

fn header(flags: u8, length: u64) -> Vec<u8> {
    let mut bytes = vec![flags | LONG];
    bytes.extend(length.to_be_bytes());
    bytes
}

/// A peer that has shaken hands as a PUSH socket called "me".
fn ready() -> Vec<u8> {
    let mut bytes = greeting();
    bytes.extend(command("READY", &[("Socket-Type", b"PUSH"), ("Identity", b"me")]));
    bytes
}

fn after_ready(frames: &[Vec<u8>]) -> Vec<u8> {
    [ready(), frames.concat()].concat()
}

fn whole(bytes: &[u8]) -> Result<Option<Vec<u8>>, Violation> {
    StreamCheck::new(SMALL).take(bytes)
}

/// The same in two pieces, cut at each place: it never matters.
fn verdict(bytes: &[u8]) -> Result<Option<Vec<u8>>, Violation> {
    let verdict = whole(bytes);
    for cut in 0..bytes.len() {
        let mut check = StreamCheck::new(SMALL);
        let cut_up = check.take(&bytes[..cut]).and_then(|first| {
            let second = check.take(&bytes[cut..])?;
            Ok(first.or(second))
        });
        assert_eq!(cut_up, verdict, "cut at {cut}");
    }
    verdict
}

#[test]
fn what_peers_say_passes() {
    let identity = Ok(Some(b"me".to_vec()));
    assert_eq!(verdict(&ready()), identity);
    assert_eq!(verdict(&greeting()), Ok(None));
    let of_3_1 = [&greeting()[..11], &[1], &greeting()[12..]].concat();
    assert_eq!(verdict(&of_3_1), Ok(None));
    let nameless = [greeting(), command("READY", &[("Socket-Type", b"PULL")])].concat();
    assert_eq!(verdict(&nameless), Ok(Some(Vec::new())));
    let messages = after_ready(&[
        frame(MORE, b""),
        frame(MORE, &[7; 300]),
        frame(0, b"last"),
        frame(0, &[8; 1000]),
        frame(MORE, &[9; 700]),
        frame(0, &[9; 800]),
        frame(0, b""),
    ]);
    assert_eq!(verdict(&messages), identity);
}

#[test]
fn every_other_greeting_is_refused() {
    for (at, byte) in [(0, 0xfe), (9, 0), (10, 2), (10, 0), (12, b'P'), (15, 0), (16, b'L')] {
        let mut bytes = greeting();
        bytes[at] = byte;
        assert_eq!(verdict(&bytes), Err(Violation::Greeting), "{byte} at {at}");
    }
    // Of the rest nothing is asked.
    for at in [1, 8, 11, 32, 33, 63] {
        let mut bytes = greeting();
        bytes[at] = 1;
        assert_eq!(verdict(&bytes), Ok(None), "at {at}");
    }
}

#[test]
fn nothing_but_a_sound_ready_may_follow_the_greeting() {
    let long_identity = [b'i'; 256];
    let cases = [
        frame(0, b"a message"),
        frame(COMMAND, b""),
        command("PING", &[]),
        command("READYX", &[]),
        command("READY", &[("Identity", &long_identity)]),
        frame(COMMAND | MORE, b"\x05READY"),
        header(COMMAND, READY_BYTES_MAX + 1),
        header(COMMAND, 1 << 40),
        header(COMMAND, u64::MAX),
        // Lengths of names and values that say more than is there.
        frame(COMMAND, b"\xc8REA"),
        frame(COMMAND, b"\x05READY\xc8abc"),
        frame(COMMAND, b"\x05READY\x01a"),
        frame(COMMAND, b"\x05READY\x01a\x00\x00\x00\x02b"),
        frame(COMMAND, b"\x05READY\x01a\xff\xff\xff\xff"),
    ];
    for case in cases {
        let bytes = [greeting(), case.clone()].concat();
        assert_eq!(verdict(&bytes), Err(Violation::Ready), "{case:?}");
    }
}

#[test]
fn frames_and_messages_have_bounds() {
    let cases = [
        (header(0, 1001), Violation::FrameBytes),
        (header(MORE, 1 << 40), Violation::FrameBytes),
        (header(0, 1 << 63), Violation::FrameBytes),
        (header(0, u64::MAX), Violation::FrameBytes),
        ([frame(MORE, &[1; 1000]), header(0, 501)].concat(), Violation::MessageBytes),
        ([frame(MORE, b"1").repeat(3), frame(0, b"4")].concat(), Violation::Frames),
        (frame(8, b""), Violation::Flags),
        (frame(0x80, b""), Violation::Flags),
        (command("PING", &[]), Violation::Command),
        (command("READY", &[]), Violation::Command),
    ];
    for (case, violation) in cases {
        assert_eq!(verdict(&after_ready(std::slice::from_ref(&case))), Err(violation), "{case:?}");
    }
    // A frame is held to its own bound also where it is not the last of its message.
    assert_eq!(verdict(&after_ready(&[header(MORE, 1000)])), Ok(Some(b"me".to_vec())));
}

/// What lets the crate reserve memory is the last byte of a length, so that is what must not pass.
#[test]
fn a_length_is_refused_with_its_last_byte() {
    for length in [1001, 1 << 40, 1 << 63, u64::MAX] {
        let bytes = after_ready(&[header(0, length)]);
        let mut check = StreamCheck::new(SMALL);
        assert!(check.take(&bytes[..bytes.len() - 1]).is_ok(), "{length}");
        assert_eq!(check.take(&bytes[bytes.len() - 1..]), Err(Violation::FrameBytes), "{length}");
    }
}

/// The sizes of the frames of one message, each of which and all of which are within bounds.
fn message() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..1001_usize, 1..4)
        .prop_filter("within bounds", |sizes| sizes.iter().sum::<usize>() <= 1500)
}

proptest! {
    #[test]
    fn sound_messages_pass_in_any_pieces(
        messages in prop::collection::vec(message(), 0..8),
        pieces in prop::collection::vec(1..700_usize, 1..20),
    ) {
        let mut bytes = ready();
        for sizes in &messages {
            for (nth, size) in sizes.iter().enumerate() {
                let more = if nth + 1 < sizes.len() { MORE } else { 0 };
                bytes.extend(frame(more, &vec![0xff; *size]));
            }
        }
        let mut check = StreamCheck::new(SMALL);
        let mut rest = &bytes[..];
        for piece in pieces.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            prop_assert!(check.take(now).is_ok());
            rest = later;
        }
        prop_assert!(check.is_ready());
    }

    /// Whatever comes, the check neither panics nor cares how it is cut, and what it lets through
    /// announces no frame beyond the bound.
    #[test]
    fn anything_else_is_judged_the_same_in_any_pieces(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        flips in prop::collection::vec((0..120_usize, any::<u8>()), 0..4),
        begin in 0..3_u8,
        cut in 0..300_usize,
    ) {
        let mut start = match begin { 0 => Vec::new(), 1 => greeting(), _ => ready() };
        start.append(&mut bytes);
        for (at, byte) in flips {
            if let Some(place) = start.get_mut(at) {
                *place = byte;
            }
        }
        let cut = cut.min(start.len());
        let mut check = StreamCheck::new(SMALL);
        let cut_up = check.take(&start[..cut]).and_then(|first| {
            Ok(first.or(check.take(&start[cut..])?))
        });
        prop_assert_eq!(&cut_up, &whole(&start));
        if cut_up.is_ok() {
            prop_assert!(longest_announced(&start) <= SMALL.frame_bytes);
        }
    }
}

/// The longest frame whose header is complete in `bytes`, read the way the crate reads them.
fn longest_announced(bytes: &[u8]) -> u64 {
    let mut rest = bytes.get(GREETING_BYTES..).unwrap_or_default();
    let mut longest = 0;
    while let [flags, after @ ..] = rest {
        let length_bytes = if flags & LONG != 0 { 8 } else { 1 };
        let Some((length, after)) = after.split_at_checked(length_bytes) else { break };
        let length = length.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        // READY has a bound of its own.
        if flags & COMMAND == 0 {
            longest = longest.max(length);
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(after.len());
        rest = &after[length..];
    }
    longest
}
