//! Addresses, folders and files.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;

use super::*;

fn parsed(text: &str) -> String {
    match text.parse::<Address>() {
        Ok(address) => format!("{address} local: {}", address.is_local()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn addresses_are_read_or_refused_with_the_way_out() {
    let texts = [
        "ipc:///run/pawl/core",
        "tcp://127.0.0.1:5555",
        "tcp://[::1]:0",
        "tcp://*:7",
        "tcp://node-3.example:7000",
        "",
        "core.sock",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "tcp://host",
        "tcp://host:70000",
        "tcp://:1",
        "tcp://::1:1",
        "udp://host:1",
    ];
    let seen: Vec<String> = texts.map(|text| format!("{text} => {}", parsed(text))).into();
    insta::assert_snapshot!(seen.join("\n"), @r#"
    ipc:///run/pawl/core => ipc:///run/pawl/core local: true
    tcp://127.0.0.1:5555 => tcp://127.0.0.1:5555 local: true
    tcp://[::1]:0 => tcp://[::1]:0 local: true
    tcp://*:7 => tcp://0.0.0.0:7 local: false
    tcp://node-3.example:7000 => tcp://node-3.example:7000 local: false
     => "" is no address: write ipc://PATH or tcp://HOST:PORT
    core.sock => "core.sock" is no address: write ipc://PATH or tcp://HOST:PORT
    ipc:// => "ipc://" is no address: name the file of the socket
    ipc://* => "ipc://*" is no address: name the file of the socket
    ipc://@abstract => "ipc://@abstract" is no address: abstract sockets are not supported
    tcp://host => "tcp://host" is no address: the port is missing: write tcp://HOST:PORT
    tcp://host:70000 => "tcp://host:70000" is no address: the port is a number from 0 to 65535
    tcp://:1 => "tcp://:1" is no address: the host is missing: write tcp://HOST:PORT
    tcp://::1:1 => "tcp://::1:1" is no address: write an IPv6 host in brackets: tcp://[::1]:PORT
    udp://host:1 => "udp://host:1" is no address: write ipc://PATH or tcp://HOST:PORT
    "#);
}

#[test]
fn a_path_that_the_kernel_does_not_take_is_refused_naming_the_limit() {
    assert!(format!("ipc:///{}", "x".repeat(106)).parse::<Address>().is_ok());
    insta::assert_snapshot!(parsed(&format!("ipc:///{}", "x".repeat(107))), @r"
    the socket path /xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx takes 108 bytes, the system allows 107: choose a shorter folder
    ");
    let base = std::env::temp_dir().join("y".repeat(90));
    let error = SocketDir::create(&base).unwrap_err().to_string();
    assert!(error.contains("the system allows 107"), "{error}");
}

#[test]
fn the_folder_is_for_its_owner_alone_and_goes_with_its_run() {
    let dir = SocketDir::create(&std::env::temp_dir()).unwrap();
    let path = dir.path().to_owned();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
    let Address::Ipc(socket) = dir.address("core").unwrap() else { unreachable!() };
    drop(UnixListener::bind(socket).unwrap());
    drop(dir);
    assert!(!path.exists());
}

#[test]
fn the_folder_of_a_killed_run_is_removed_by_the_next_and_that_of_a_living_one_is_not() {
    let base = SocketDir::create(&std::env::temp_dir()).unwrap();
    let living = SocketDir::create(base.path()).unwrap();
    // A killed run leaves its folder, with a lock that nobody holds, made some time ago.
    let killed = base.path().join("pawl-0badf00d");
    std::fs::create_dir(&killed).unwrap();
    let lock = std::fs::File::create(killed.join("lock")).unwrap();
    let some_time_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    for file in [&lock, &std::fs::File::open(living.path().join("lock")).unwrap()] {
        file.set_modified(some_time_ago).unwrap();
    }
    drop(lock);
    let foreign = base.path().join("pawl-0badbeef");
    std::fs::create_dir(&foreign).unwrap();

    let next = SocketDir::create(base.path()).unwrap();
    let there = [&killed, living.path(), &foreign, next.path()].map(|path| path.exists());
    assert_eq!(there, [false, true, true, true]);
}

async fn bind_error(address: &Address) -> String {
    let config = CoreEndpointConfig::new(vec![address.clone()]);
    match CoreEndpoint::bind(config).await {
        Ok(_) => "no error".into(),
        Err(error) => error.to_string().replace(&address.to_string(), "ADDRESS"),
    }
}

#[tokio::test]
async fn only_a_socket_that_nobody_listens_at_is_replaced() {
    let (_dir, address) = ipc();
    let Address::Ipc(path) = &address else { unreachable!() };
    std::fs::write(path, "precious").unwrap();
    insta::assert_snapshot!(bind_error(&address).await, @r"
    cannot listen at ADDRESS: a file that is no socket lies there: remove it or choose another path
    ");
    assert_eq!(std::fs::read_to_string(path).unwrap(), "precious");
    std::fs::remove_file(path).unwrap();

    let other = UnixListener::bind(path).unwrap();
    insta::assert_snapshot!(bind_error(&address).await, @r"
    cannot listen at ADDRESS: another process listens there
    ");
    drop(other);

    let core = CoreEndpoint::bind(CoreEndpointConfig::new(vec![address.clone()])).await.unwrap();
    assert_eq!(std::fs::metadata(path).unwrap().mode() & 0o777, 0o600);
    insta::assert_snapshot!(bind_error(&address).await, @r"
    cannot listen at ADDRESS: another process listens there
    ");
    drop(core);
    assert!(!path.exists(), "a dropped core leaves its socket behind");
}

#[tokio::test]
async fn a_dropped_core_leaves_the_socket_of_its_successor_alone() {
    let (_dir, address) = ipc();
    let Address::Ipc(path) = &address else { unreachable!() };
    let core = CoreEndpoint::bind(CoreEndpointConfig::new(vec![address.clone()])).await.unwrap();
    std::fs::remove_file(path).unwrap();
    let successor = UnixListener::bind(path).unwrap();
    drop(core);
    assert!(path.exists());
    drop(successor);
}
