//! The connections between processes: each keeps its order, none keeps pace with another.
//!
//! What a process has sent before its end arrives; what is on its way when a connection is cut is
//! lost. Either way the other side is told, as the socket monitors tell it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;

/// A connection; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conn(pub u64);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Socket {
    Control,
    Input,
    Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Core,
    Frontend,
}

impl Side {
    pub fn other(self) -> Self {
        match self {
            Self::Core => Self::Frontend,
            Self::Frontend => Self::Core,
        }
    }
}

/// What arrives.
#[derive(Clone, Debug)]
pub enum Parcel {
    Message(Vec<Bytes>),
    /// The other side is gone, or the connection is.
    Closed,
}

struct Pipe {
    on_the_way: VecDeque<Parcel>,
    last_arrival: u64,
    /// The receiver still listens.
    open: bool,
}

struct Connection {
    socket: Socket,
    frontend: usize,
    slowest: Duration,
    to: [Pipe; 2],
}

/// Every connection that either side still has.
#[derive(Default)]
pub struct Net {
    connections: BTreeMap<Conn, Connection>,
    next: u64,
}

fn at(side: Side) -> usize {
    side as usize
}

impl Net {
    /// A connection between frontend `frontend` and the core, of which no message takes longer
    /// than `slowest` (unless it waits for one before it).
    pub fn connect(&mut self, socket: Socket, frontend: usize, slowest: Duration) -> Conn {
        let conn = Conn(self.next);
        self.next += 1;
        let pipe = || Pipe { on_the_way: VecDeque::new(), last_arrival: 0, open: true };
        self.connections
            .insert(conn, Connection { socket, frontend, slowest, to: [pipe(), pipe()] });
        conn
    }

    pub fn slowest(&self, conn: Conn) -> Option<Duration> {
        self.connections.get(&conn).map(|connection| connection.slowest)
    }

    /// Whose it is and what for, as long as `side` listens to it.
    pub fn of(&self, conn: Conn, side: Side) -> Option<(Socket, usize)> {
        let connection = self.connections.get(&conn)?;
        connection.to[at(side)].open.then_some((connection.socket, connection.frontend))
    }

    /// Puts a parcel for `to` on its way; returns when it arrives.
    pub fn send(&mut self, conn: Conn, to: Side, parcel: Parcel, arrives: u64) -> Option<u64> {
        let pipe = &mut self.connections.get_mut(&conn)?.to[at(to)];
        if !pipe.open {
            return None;
        }
        pipe.last_arrival = pipe.last_arrival.max(arrives);
        pipe.on_the_way.push_back(parcel);
        Some(pipe.last_arrival)
    }

    /// What arrives at `to` now.
    pub fn receive(&mut self, conn: Conn, to: Side) -> Option<Parcel> {
        let pipe = &mut self.connections.get_mut(&conn)?.to[at(to)];
        if !pipe.open {
            return None;
        }
        pipe.on_the_way.pop_front()
    }

    /// `side` listens no more.
    pub fn forget(&mut self, conn: Conn, side: Side) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            let pipe = &mut connection.to[at(side)];
            pipe.open = false;
            pipe.on_the_way.clear();
            if connection.to.iter().all(|pipe| !pipe.open) {
                self.connections.remove(&conn);
            }
        }
    }

    /// What is on its way is lost. The parcels' places stay, so that each arrival finds its own.
    pub fn cut(&mut self, conn: Conn) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            for pipe in &mut connection.to {
                for parcel in &mut pipe.on_the_way {
                    *parcel = Parcel::Closed;
                }
            }
        }
    }

    pub fn all(&self, side: Side, frontend: usize) -> Vec<Conn> {
        let of = |(conn, c): (&Conn, &Connection)| {
            (c.frontend == frontend && c.to[at(side)].open).then_some(*conn)
        };
        self.connections.iter().filter_map(of).collect()
    }

    pub fn num_open(&self) -> usize {
        self.connections.len()
    }
}
