//! The core's table of clients: who joined, over what, and when they are gone.

use std::collections::{BTreeMap, BTreeSet};

use super::core_member::{Member, Phase, Via};
use super::message::{ControlMessage, JOIN_VERSION, Join, Role};
use super::{ClientId, CoreAction, CoreInput, HeartbeatConfig, LeaveReason, OwnClock, PeerId};
use crate::clock::Stamp;

/// Clients one core serves at most; a join beyond it is refused.
const CLIENTS_MAX: usize = 256;
/// Of those, taps: each may hold some MiB of copies, and nobody looks at more.
const TAPS_MAX: usize = 8;

/// The core's half of native joining and of vLLM's handshake.
#[derive(Debug)]
pub struct CoreRendezvous {
    engine_index: u32,
    heartbeat: HeartbeatConfig,
    own_clock: OwnClock,
    taps_only: bool,
    ready: bool,
    stopping: bool,
    progress: u64,
    busy: bool,
    // At most CLIENTS_MAX; a join beyond it is refused.
    members: BTreeMap<ClientId, Member>,
    // Of vLLM's handshakes, those whose INIT was taken: each is told once to start again.
    initialised: BTreeSet<u32>,
    next_client: u32,
    last_tick: Stamp,
    ignored: u64,
}

impl CoreRendezvous {
    /// A core that has just started listening.
    #[must_use]
    pub fn new(engine_index: u32, heartbeat: HeartbeatConfig, now: Stamp) -> Self {
        Self {
            engine_index,
            heartbeat,
            own_clock: OwnClock::new(now),
            taps_only: false,
            ready: false,
            stopping: false,
            progress: 0,
            busy: false,
            members: BTreeMap::new(),
            initialised: BTreeSet::new(),
            next_client: 0,
            last_tick: now,
            ignored: 0,
        }
    }

    /// The same for one that serves no requests, only taps.
    #[must_use]
    pub fn taps_only(self) -> Self {
        Self { taps_only: true, ..self }
    }

    /// What PONGs tell from now on.
    pub fn set_progress(&mut self, progress: u64) {
        self.progress = progress;
    }

    /// Whether there is work, so that a standing progress counter means a hang.
    pub fn set_busy(&mut self, busy: bool) {
        self.busy = busy;
    }

    /// Messages that were dropped because they could not be read or made no sense.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Counts a message that could not even be handed in.
    pub fn count_ignored(&mut self) {
        self.ignored += 1;
    }

    /// When [`CoreInput::Tick`] is due.
    #[must_use]
    pub fn next_tick(&self) -> Stamp {
        self.last_tick + self.heartbeat.interval
    }

    /// Takes one input, returns what to do.
    #[must_use]
    pub fn handle(&mut self, now: Stamp, input: CoreInput) -> Vec<CoreAction> {
        let mut actions = Vec::new();
        match input {
            CoreInput::Control { from, message } => {
                self.on_control(now, from, &message, &mut actions);
            }
            CoreInput::ControlGone { from } => {
                if let Some(client) = self.by_control(&from) {
                    self.remove(client, LeaveReason::Disconnected, &mut actions);
                }
            }
            CoreInput::Init { dialer, inputs, outputs } => {
                self.on_init(dialer, inputs, outputs, &mut actions);
            }
            CoreInput::HandshakeGone { dialer } => {
                self.remove_group(dialer, LeaveReason::Disconnected, &mut actions);
            }
            CoreInput::LinkUp { client } => self.on_link_up(client, &mut actions),
            CoreInput::LinkDown { client, reason } => {
                self.on_link_down(client, reason, &mut actions);
            }
            CoreInput::Ready => self.on_ready(&mut actions),
            CoreInput::Stopping => self.on_stopping(&mut actions),
            CoreInput::Tick => self.on_tick(now, &mut actions),
        }
        actions
    }

    fn on_control(
        &mut self,
        now: Stamp,
        from: PeerId,
        message: &[u8],
        actions: &mut Vec<CoreAction>,
    ) {
        let member = self.by_control(&from);
        // Whatever a member says, it lives.
        if let Some(Member { via: Via::Native { heard, .. }, .. }) =
            member.and_then(|client| self.members.get_mut(&client))
        {
            *heard = now;
        }
        match ControlMessage::decode(message) {
            Ok(ControlMessage::Join(join)) => self.on_join(now, from, join, actions),
            Ok(ControlMessage::JoinOfVersion(version)) => {
                let reason = format!(
                    "the core speaks join version {JOIN_VERSION}, the frontend {version}: run both \
                     from the same build"
                );
                actions.push(refused(from, reason));
            }
            Ok(ControlMessage::Leave { epoch }) => {
                if let Some(client) = self.by_epoch(member, epoch) {
                    self.remove(client, LeaveReason::Left, actions);
                }
                // Said also to one that is no member: its LEAVE may have come twice.
                actions.push(CoreAction::Reply {
                    to: from,
                    message: ControlMessage::LeaveDone { epoch },
                });
            }
            Ok(ControlMessage::Ping { epoch, seq }) => {
                let message = if self.by_epoch(member, epoch).is_some() {
                    let (progress, busy) = (self.progress, self.busy);
                    ControlMessage::Pong { epoch, seq, progress, busy }
                } else {
                    ControlMessage::Gone { epoch, reason: "the core does not know it".into() }
                };
                actions.push(CoreAction::Reply { to: from, message });
            }
            Ok(ControlMessage::Ack { epoch, bytes }) => match self.by_epoch(member, epoch) {
                Some(client) if self.has_joined(client) => {
                    actions.push(CoreAction::Acknowledged { client, bytes });
                }
                _ => self.ignored += 1,
            },
            Ok(other) => {
                tracing::debug!(?other, "a frontend sent what only a core sends");
                self.ignored += 1;
            }
            Err(error) => {
                tracing::debug!(%error, "control message dropped");
                self.ignored += 1;
            }
        }
    }

    fn on_join(&mut self, now: Stamp, from: PeerId, join: Join, actions: &mut Vec<CoreAction>) {
        if self.taps_only && join.role != Role::Tap {
            let reason = "a frontend serves its taps here; requests and calls go to the core's \
                          address";
            actions.push(refused(from, reason.into()));
            return;
        }
        let known = self.members.iter().find_map(|(client, member)| match &member.via {
            Via::Native { instance, epoch, .. } if *instance == join.instance => {
                Some((*client, *epoch))
            }
            _ => None,
        });
        if let Some((client, epoch)) = known {
            if join.epoch < epoch {
                actions.push(refused(from, format!("epoch {epoch:x} of it has joined since")));
                return;
            }
            if join.epoch == epoch {
                self.on_join_again(now, client, from, actions);
                return;
            }
            self.remove(client, LeaveReason::Replaced, actions);
        }
        // One control connection is one frontend, and so is one address: two links to the same
        // ROUTER would show it the same identity twice.
        let same: Vec<ClientId> = self
            .members
            .iter()
            .filter(|(_, member)| {
                matches!(&member.via, Via::Native { control, .. } if *control == from)
                    || member.input == join.input
                    || member.output == join.output
            })
            .map(|(client, _)| *client)
            .collect();
        for client in same {
            self.remove(client, LeaveReason::Replaced, actions);
        }
        if self.members.len() >= CLIENTS_MAX {
            actions.push(refused(from, format!("the core serves {CLIENTS_MAX} frontends already")));
            return;
        }
        let taps = self.members.values().filter(|member| member.role == Role::Tap).count();
        if join.role == Role::Tap && taps >= TAPS_MAX {
            actions.push(refused(from, format!("{TAPS_MAX} taps are here already")));
            return;
        }
        let Join { input, output, pid, instance, epoch, role, taps } = join;
        let via = Via::Native { control: from, pid, instance, epoch, heard: now, taps };
        self.admit(Member { via, input, output, role, phase: Phase::Held }, actions);
    }

    /// The same JOIN once more: answered again if it had been, and never a second link.
    fn on_join_again(
        &mut self,
        now: Stamp,
        client: ClientId,
        from: PeerId,
        actions: &mut Vec<CoreAction>,
    ) {
        let engine_index = self.engine_index;
        let Some(member) = self.members.get_mut(&client) else { return };
        let Via::Native { control, epoch, heard, .. } = &mut member.via else { return };
        *control = from.clone();
        *heard = now;
        if member.phase == Phase::Joined {
            let (client_index, epoch) = (client.0, *epoch);
            let message = ControlMessage::Welcome { client_index, epoch, engine_index };
            actions.push(CoreAction::Reply { to: from, message });
        }
    }

    fn on_init(
        &mut self,
        dialer: u32,
        inputs: Vec<String>,
        outputs: Vec<String>,
        actions: &mut Vec<CoreAction>,
    ) {
        if !self.initialised.insert(dialer) {
            self.ignored += 1;
            return;
        }
        let fits = self.members.len() + inputs.len() <= CLIENTS_MAX;
        if inputs.is_empty() || inputs.len() != outputs.len() || !fits {
            tracing::warn!(
                inputs = inputs.len(),
                outputs = outputs.len(),
                "a vLLM frontend's INIT cannot be used: one output per input is needed, at most \
                 {CLIENTS_MAX} clients in all"
            );
            self.handshake_again(dialer, actions);
            return;
        }
        for (input, output) in inputs.into_iter().zip(outputs) {
            let via = Via::Handshake { dialer, again: false };
            let role = Role::Frontend;
            self.admit(Member { via, input, output, role, phase: Phase::Held }, actions);
        }
    }

    fn admit(&mut self, member: Member, actions: &mut Vec<CoreAction>) {
        let client = self.insert(member);
        if self.ready {
            self.open(client, actions);
        }
    }

    fn insert(&mut self, member: Member) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        self.members.insert(client, member);
        client
    }

    fn open(&mut self, client: ClientId, actions: &mut Vec<CoreAction>) {
        let Some(member) = self.members.get_mut(&client) else { return };
        if member.phase == Phase::Held {
            member.phase = Phase::Linking;
            actions.push(CoreAction::OpenLink {
                client,
                input: member.input.clone(),
                output: member.output.clone(),
                acknowledges: member.is_native(),
                role: member.role,
            });
        }
    }

    fn on_ready(&mut self, actions: &mut Vec<CoreAction>) {
        self.ready = true;
        self.open_all(actions);
    }

    /// Tells those that are here; whoever joins later is told when he has.
    fn on_stopping(&mut self, actions: &mut Vec<CoreAction>) {
        if !std::mem::replace(&mut self.stopping, true) {
            actions.extend(self.members.values().filter_map(Member::told_of_stopping));
        }
    }

    fn open_all(&mut self, actions: &mut Vec<CoreAction>) {
        let held: Vec<ClientId> = self.members.keys().copied().collect();
        for client in held {
            self.open(client, actions);
        }
    }

    fn on_link_up(&mut self, client: ClientId, actions: &mut Vec<CoreAction>) {
        let engine_index = self.engine_index;
        let Some(member) = self.members.get_mut(&client) else { return };
        if member.phase != Phase::Linking {
            return;
        }
        member.phase = Phase::Joined;
        let stopping = member.told_of_stopping().filter(|_| self.stopping);
        let (peer, role) = (member.peer(), member.role);
        let mut of_dialer = None;
        match &member.via {
            Via::Native { control, epoch, .. } => {
                let (to, epoch) = (control.clone(), *epoch);
                let message =
                    ControlMessage::Welcome { client_index: client.0, epoch, engine_index };
                actions.push(CoreAction::Reply { to, message });
            }
            Via::Handshake { dialer, again: false } => of_dialer = Some(*dialer),
            Via::Handshake { again: true, .. } => {}
        }
        actions.extend(stopping);
        actions.push(CoreAction::Joined { client, peer, role });
        if let Some(dialer) = of_dialer {
            let mut group = self.members.values().filter(|member| member.is_of(dialer));
            if group.all(|member| member.phase == Phase::Joined) {
                actions.push(CoreAction::HandshakeDone { dialer });
            }
        }
    }

    fn on_link_down(
        &mut self,
        client: ClientId,
        reason: LeaveReason,
        actions: &mut Vec<CoreAction>,
    ) {
        let Some(member) = self.members.get(&client) else { return };
        let unfinished = member.phase != Phase::Joined;
        match member.via {
            // A handshake with one link missing is no handshake: all of it starts again.
            Via::Handshake { dialer, again: false } if unfinished => {
                self.remove_group(dialer, reason, actions);
            }
            Via::Handshake { dialer, .. } => self.lose(client, dialer, reason, actions),
            Via::Native { .. } => self.remove(client, reason, actions),
        }
    }

    /// One process of a vLLM frontend is gone. Its pair is that frontend's for as long as the core
    /// serves it: whoever takes the process's place binds the same addresses, so they are tried
    /// again and again, as vLLM's own sockets do. With the last of its links the frontend is gone.
    fn lose(
        &mut self,
        client: ClientId,
        dialer: u32,
        reason: LeaveReason,
        actions: &mut Vec<CoreAction>,
    ) {
        let mut others = self.members.iter().filter(|(other, _)| **other != client);
        let rest = others.any(|(_, m)| m.is_of(dialer) && m.phase == Phase::Joined);
        if !rest {
            self.remove_group(dialer, reason, actions);
            return;
        }
        let Some(Member { input, output, role, .. }) = self.members.get(&client) else { return };
        let via = Via::Handshake { dialer, again: true };
        let (input, output, role) = (input.clone(), output.clone(), *role);
        self.remove(client, reason, actions);
        // The next tick opens it.
        self.insert(Member { via, input, output, role, phase: Phase::Held });
    }

    fn on_tick(&mut self, now: Stamp, actions: &mut Vec<CoreAction>) {
        self.last_tick = now;
        if self.ready {
            self.open_all(actions);
        }
        // Frontends ping unasked: those of the time this process was stopped lie in the socket.
        self.own_clock.jumped(now, &self.heartbeat);
        if !self.own_clock.has_read_since(now, &self.heartbeat) {
            return;
        }
        let silence = self.heartbeat.silence;
        let silent: Vec<ClientId> = self
            .members
            .iter()
            .filter(|(_, member)| match &member.via {
                Via::Native { heard, .. } => now.since(*heard) >= silence,
                Via::Handshake { .. } => false,
            })
            .map(|(client, _)| *client)
            .collect();
        for client in silent {
            self.remove(client, LeaveReason::Silent, actions);
        }
    }

    fn remove_group(&mut self, dialer: u32, reason: LeaveReason, actions: &mut Vec<CoreAction>) {
        let group: Vec<ClientId> = self
            .members
            .iter()
            .filter(|(_, member)| member.is_of(dialer))
            .map(|(client, _)| *client)
            .collect();
        for client in group {
            self.remove(client, reason.clone(), actions);
        }
    }

    fn remove(&mut self, client: ClientId, reason: LeaveReason, actions: &mut Vec<CoreAction>) {
        let Some(member) = self.members.remove(&client) else { return };
        if member.phase != Phase::Held {
            actions.push(CoreAction::CloseLink { client });
        }
        match member.via {
            Via::Native { control, epoch, .. } if reason != LeaveReason::Left => {
                let message = ControlMessage::Gone { epoch, reason: reason.to_string() };
                actions.push(CoreAction::Reply { to: control, message });
            }
            Via::Native { .. } => {}
            Via::Handshake { dialer, .. } => {
                if !self.members.values().any(|member| member.is_of(dialer)) {
                    self.handshake_again(dialer, actions);
                }
            }
        }
        if member.phase == Phase::Joined {
            actions.push(CoreAction::Left { client, reason, role: member.role });
        } else {
            tracing::debug!(client = client.0, %reason, "a join came to nothing");
        }
    }

    fn handshake_again(&mut self, dialer: u32, actions: &mut Vec<CoreAction>) {
        if self.initialised.remove(&dialer) {
            actions.push(CoreAction::HandshakeAgain { dialer });
        }
    }

    fn has_joined(&self, client: ClientId) -> bool {
        self.members.get(&client).is_some_and(|member| member.phase == Phase::Joined)
    }

    fn by_control(&self, from: &PeerId) -> Option<ClientId> {
        self.members.iter().find_map(|(client, member)| match &member.via {
            Via::Native { control, .. } if control == from => Some(*client),
            _ => None,
        })
    }

    fn by_epoch(&self, client: Option<ClientId>, wanted: u64) -> Option<ClientId> {
        client.filter(|client| {
            matches!(
                self.members.get(client).map(|member| &member.via),
                Some(Via::Native { epoch, .. }) if *epoch == wanted
            )
        })
    }
}

fn refused(to: PeerId, reason: String) -> CoreAction {
    CoreAction::Reply { to, message: ControlMessage::Refused { version: JOIN_VERSION, reason } }
}
