//! The accept loop over real sockets.

use super::*;
use crate::config::HttpLimits;
use crate::server;
use pawl_shared::shutdown::Shutdown;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// A test that needs longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct Served {
    address: SocketAddr,
    shutdown: Shutdown,
    server: JoinHandle<anyhow::Result<()>>,
}

async fn serve(stage: &Stage) -> Served {
    let (tell, told) = tokio::sync::oneshot::channel();
    let shutdown = Shutdown::default();
    let run = server::serve(Arc::clone(&stage.app), shutdown.clone(), move |bound| {
        tell.send(bound.http).unwrap();
    });
    let server = tokio::spawn(run);
    Served { address: told.await.unwrap(), shutdown, server }
}

fn config(limits: HttpLimits) -> FrontendConfig {
    FrontendConfig { port: 0, limits, shutdown_timeout: PATIENCE, ..FrontendConfig::default() }
}

/// Sends bytes and reads until the server closes.
async fn exchange(address: SocketAddr, parts: &[&[u8]]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut seen = Vec::new();
    for part in parts {
        // The server may have answered and closed already.
        if stream.write_all(part).await.is_err() {
            break;
        }
    }
    let read = stream.read_to_end(&mut seen);
    let _ = tokio::time::timeout(PATIENCE, read).await.expect("the server closes");
    String::from_utf8_lossy(&seen).lines().next().unwrap_or("(closed)").to_owned()
}

const GET_VERSION: &[u8] = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

#[tokio::test]
async fn heads_that_are_slow_or_too_large_are_cut_off() {
    let limits = HttpLimits {
        head_bytes_max: 8_192,
        header_timeout: Duration::from_millis(200),
        body_timeout: Duration::from_millis(200),
        ..HttpLimits::default()
    };
    let stage = Stage::with(config(limits), |_| Vec::new());
    let served = serve(&stage).await;
    let started = Instant::now();
    let half: Vec<_> = (0..20)
        .map(|_| tokio::spawn(exchange(served.address, &[b"GET / HTTP/1.1\r\nHost: x\r\n"])))
        .collect();
    for closed in half {
        assert_eq!(closed.await.unwrap(), "(closed)");
    }
    assert!(started.elapsed() >= Duration::from_millis(200), "they were given their time");

    let mut shown = String::new();
    let long = format!("GET /version HTTP/1.1\r\nHost: x\r\nX: {}", "a".repeat(12_000));
    let (one, two) = long.split_at(6_000);
    let many: String = (0..500).map(|at| format!("X{at}: y\r\n")).collect();
    let many = format!("GET /version HTTP/1.1\r\n{many}\r\n");
    let body = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{";
    let large = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n";
    let url = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "u".repeat(1 << 20));
    for (name, parts) in [
        ("whole", vec![GET_VERSION]),
        ("12 KiB head", vec![long.as_bytes(), b"\r\nConnection: close\r\n\r\n"]),
        ("12 KiB head in parts", vec![one.as_bytes(), two.as_bytes(), b"\r\n\r\n"]),
        ("500 headers", vec![many.as_bytes()]),
        ("1 MiB URL", vec![url.as_bytes()]),
        ("not HTTP", vec![b"hello\r\n\r\n".as_slice()]),
        ("body that stays away", vec![body.as_slice()]),
        ("body announced too large", vec![large.as_slice()]),
    ] {
        shown += &format!("{name}: {}\n", exchange(served.address, &parts).await);
    }
    insta::assert_snapshot!(shown);
    served.shutdown.request();
    served.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn more_connections_than_places_wait_their_turn() {
    let limits = HttpLimits { connections_max: 2, ..HttpLimits::default() };
    let stage = Stage::with(config(limits), |_| Vec::new());
    let served = serve(&stage).await;
    let first = TcpStream::connect(served.address).await.unwrap();
    let second = TcpStream::connect(served.address).await.unwrap();
    let mut third = tokio::spawn(exchange(served.address, &[GET_VERSION]));
    // The two hold their places without a word; only when one leaves is the third served.
    let early = tokio::time::timeout(Duration::from_millis(300), &mut third).await;
    assert!(early.is_err(), "it had a place: {early:?}");
    drop(first);
    assert_eq!(third.await.unwrap(), "HTTP/1.1 200 OK");
    drop(second);
    served.shutdown.request();
    served.server.await.unwrap().unwrap();
}

async fn open_stream(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = r#"{"prompt":"Hi","stream":true}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("data: {") {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await.unwrap();
        assert!(count > 0, "closed early: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
    stream
}

/// Waits for a condition that another task makes true.
async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the condition comes true");
}

#[tokio::test]
async fn a_client_that_closes_aborts_its_request() {
    let stage = Stage::with(config(HttpLimits::default()), |_| words(&["red"]));
    let served = serve(&stage).await;
    let stream = open_stream(served.address).await;
    assert_eq!(stage.aborted(), 0);
    drop(stream);
    until(|| stage.aborted() == 1).await;

    // The same for one that waits for a whole answer.
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    let body = r#"{"prompt":"Hi"}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    until(|| stage.app.load() == 1).await;
    drop(stream);
    until(|| stage.aborted() == 2 && stage.app.load() == 0).await;
    served.shutdown.request();
    served.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let limits = HttpLimits { write_timeout: Duration::from_millis(200), ..HttpLimits::default() };
    // More than the kernel buffers on both sides, and no end.
    let stage = Stage::with(config(limits), |_| {
        let text = "x".repeat(1 << 20);
        words(&vec![text.as_str(); 64])
    });
    let served = serve(&stage).await;
    let stream = open_stream(served.address).await;
    until(|| stage.aborted() == 1).await;
    drop(stream);
    served.shutdown.request();
    served.server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stop_waits_for_answers_and_still_tells_newcomers() {
    let stage = Stage::with(config(HttpLimits::default()), |_| words(&["red"]));
    let served = serve(&stage).await;
    let mut held = open_stream(served.address).await;
    served.shutdown.request();
    until(|| stage.app.draining()).await;
    assert_eq!(
        exchange(served.address, &[b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"]).await,
        "HTTP/1.1 503 Service Unavailable",
        "and the connection is closed after it",
    );
    assert!(!served.server.is_finished());
    stage.engine.abort_all("the test ends it");
    let mut rest = String::new();
    held.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("shutting_down"), "{rest}");
    tokio::time::timeout(PATIENCE, served.server).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_stop_without_patience_aborts_what_is_under_way() {
    let mut config = config(HttpLimits::default());
    config.shutdown_timeout = Duration::ZERO;
    let stage = Stage::with(config, |_| words(&["red"]));
    let served = serve(&stage).await;
    let mut held = open_stream(served.address).await;
    served.shutdown.request();
    let mut rest = String::new();
    held.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains(r#""code":"shutting_down""#), "{rest}");
    tokio::time::timeout(PATIENCE, served.server).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn the_admin_port_and_the_port_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(HttpLimits::default());
    config.admin_port = Some(0);
    config.port_file = Some(folder.path().join("ports"));
    let stage = Stage::with(config, |_| Vec::new());
    let served = serve(&stage).await;
    let ports = std::fs::read_to_string(folder.path().join("ports")).unwrap();
    let ports: serde_json::Value = serde_json::from_str(&ports).unwrap();
    assert_eq!(ports["port"], served.address.port());
    let admin: SocketAddr = format!("127.0.0.1:{}", ports["admin_port"]).parse().unwrap();
    let mut shown = String::new();
    for request in [
        "GET /health",
        "GET /ready",
        "GET /load",
        "GET /version",
        "GET /metrics",
        "GET /recording",
        "DELETE /recording",
        "GET /v1/models",
    ] {
        let head = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        shown += &format!("{request}: {}\n", exchange(admin, &[head.as_bytes()]).await);
    }
    insta::assert_snapshot!(shown);
    served.shutdown.request();
    served.server.await.unwrap().unwrap();
}
