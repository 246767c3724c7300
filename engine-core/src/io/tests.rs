use pawl_shared::clock::Stamp;
use pawl_shared::protocol::{EngineCoreRequest, SamplingParams};

use super::*;

fn add(id: &str) -> Vec<Bytes> {
    let request = EngineCoreRequest::new(id.into(), vec![1, 2], SamplingParams::default());
    ClientMessage::Add(Box::new(request)).encode()
}

/// What becomes of an ADD whose payload is cut to `bytes`.
fn cut(bytes: usize) -> (Option<String>, &'static str) {
    let mut frames = add("an-id");
    frames[1] = frames[1].slice(..bytes);
    match decode(ClientId(0), &frames) {
        Inbox::Undecodable { request_id, kind, .. } => {
            (request_id.map(|id| id.as_str().to_owned()), kind)
        }
        other => panic!("it decodes: {other:?}"),
    }
}

#[test]
fn an_add_that_does_not_decode_keeps_its_id_where_it_can_be_read() {
    let mut frames = add("an-id");
    assert!(matches!(decode(ClientId(0), &frames), Inbox::Message(..)));
    // Cut anywhere, nothing of it can be trusted, not even the id.
    let whole = frames[1].len();
    assert!((0..whole).all(|bytes| cut(bytes) == (None, "truncated")), "{:?}", cut(whole - 1));
    // Whole but nonsense: a prompt that is text.
    let payload = pawl_shared::protocol::encode_value(&Value::Array(vec![
        Value::Text("an-id".into()),
        Value::Text("not token ids".into()),
    ]));
    frames[1] = payload;
    let Inbox::Undecodable { request_id, .. } = decode(ClientId(0), &frames) else {
        panic!("it decodes");
    };
    assert_eq!(request_id, Some(RequestId::from("an-id")));
}

fn at(millis: u64) -> Stamp {
    Stamp::from_nanos(1_000_000_000 + millis * 1_000_000)
}

/// Whom a repeater tells at each tick, a second apart.
fn check(ticks: &[(u64, u64)], told: &[(u64, u32)]) -> Vec<Vec<u32>> {
    let mut repeater = Repeater::default();
    repeater.join(ClientId(1), at(0));
    repeater.join(ClientId(2), at(0));
    let mut scheduler = crate::scheduler::Scheduler::new(
        crate::scheduler::SchedulerConfig::default(),
        crate::kv_cache::CacheConfig { num_blocks: 2, block_size: 16, prefix_caching: false },
    )
    .unwrap();
    repeater.gauges(scheduler.take_stats(crate::scheduler::ClientIndex(0)));
    let mut told = told.iter().peekable();
    ticks
        .iter()
        .map(|&(millis, progress)| {
            while let Some((when, client)) = told.next_if(|(when, _)| *when <= millis) {
                repeater.told(ClientId(*client), at(*when));
            }
            repeater.due(at(millis), progress).iter().map(|(client, _)| client.0).collect()
        })
        .collect()
}

#[test]
fn whoever_has_heard_nothing_for_a_second_is_told() {
    let ticks = [(0, 1), (1000, 2), (2000, 3), (3000, 4)];
    let told = [(1950, 1), (2500, 1), (2950, 2)];
    assert_eq!(check(&ticks, &told), [vec![], vec![1, 2], vec![2], vec![]]);
}

#[test]
fn nothing_is_repeated_once_work_stands_still() {
    let ticks: Vec<_> = (0..14).map(|second| (second * 1000, 7)).collect();
    let said = check(&ticks, &[]);
    let told: Vec<usize> = said.iter().map(Vec::len).collect();
    assert_eq!(told, [0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0]);
}
