//! One frontend's life: join, watch the core, notice its end, join again with a new epoch.
//!
//! The driver opens a fresh set of sockets per epoch when [`FrontendRendezvous::next_open`] says
//! so, and closes it on [`FrontendAction::Close`].

use std::time::Duration;

use bytes::Bytes;

use super::message::{ControlMessage, JOIN_VERSION, Join, Role};
use super::{FrontendAction, FrontendInput, HeartbeatConfig, OwnClock, PairSocket};
use crate::clock::Stamp;

/// After the first sign of death the output socket is still read: what the core said last lies
/// there. A killed core's sockets end within milliseconds, this bounds the rest.
const DRAIN: Duration = Duration::from_millis(500);
/// An engine says its ready response as soon as it has connected. One that has not after this long
/// said it to the process that had our pair before us.
const READY_PATIENCE: Duration = Duration::from_secs(1);
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
const BACKOFF_LAST: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum Phase {
    /// Between two epochs.
    Closed,
    /// The driver makes the sockets.
    Opening,
    Joining {
        welcome: Option<(u32, u32)>,
        ready: Option<(Bytes, u32)>,
        /// A core that has connected to our input, and when.
        connected: Option<(u32, Stamp)>,
    },
    Up {
        progress: u64,
        progressed: Stamp,
        hung: bool,
    },
    /// The core is going or gone; the output socket is read to its end, and the control socket for
    /// the reason.
    Draining {
        until: Stamp,
        reason: String,
        outputs_ended: bool,
        told: bool,
    },
    Leaving,
    Left,
}

/// Who makes the first contact. Only a core that is joined answers pings and takes
/// acknowledgements; of the others only closed sockets tell that they are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Contact {
    /// We dial the core and say JOIN.
    Join,
    /// A core dials our handshake socket.
    Handshake,
    /// A core dials our supervisor's handshake socket, which lists our pair.
    Listed {
        client_index: u32,
        /// The last ready response that was said on this pair or one beside it.
        known: Option<Bytes>,
    },
}

/// The frontend's half of native joining, and of vLLM's handshake where it owns that socket or its
/// supervisor does.
#[derive(Debug)]
pub struct FrontendRendezvous {
    contact: Contact,
    role: Role,
    taps: Option<String>,
    instance: String,
    pid: u32,
    heartbeat: HeartbeatConfig,
    own_clock: OwnClock,
    phase: Phase,
    epoch: u64,
    /// Whether the core of this epoch has said that it stops.
    stopping: bool,
    heard: Stamp,
    seq: u64,
    last_tick: Stamp,
    backoff: Duration,
    last_refusal: Option<String>,
    ignored: u64,
}

impl FrontendRendezvous {
    /// A frontend process `instance` whose epochs follow `epoch_base`: unlike any other
    /// frontend's, so that its wire ids are too.
    #[must_use]
    pub fn new(
        instance: String,
        pid: u32,
        epoch_base: u64,
        heartbeat: HeartbeatConfig,
        now: Stamp,
    ) -> Self {
        Self {
            contact: Contact::Join,
            role: Role::Frontend,
            taps: None,
            instance,
            pid,
            heartbeat,
            own_clock: OwnClock::new(now),
            phase: Phase::Closed,
            epoch: epoch_base,
            stopping: false,
            heard: now,
            seq: 0,
            last_tick: now,
            backoff: Duration::ZERO,
            last_refusal: None,
            ignored: 0,
        }
    }

    /// The same for one that waits for a core to dial its handshake socket.
    #[must_use]
    pub fn awaiting(epoch_base: u64, heartbeat: HeartbeatConfig, now: Stamp) -> Self {
        let new = Self::new(String::new(), 0, epoch_base, heartbeat, now);
        Self { contact: Contact::Handshake, ..new }
    }

    /// The same for one whose pair a supervisor lists to cores, as that of client `client_index`.
    #[must_use]
    pub fn listed(
        client_index: u32,
        epoch_base: u64,
        heartbeat: HeartbeatConfig,
        now: Stamp,
    ) -> Self {
        let contact = Contact::Listed { client_index, known: None };
        Self { contact, ..Self::new(String::new(), 0, epoch_base, heartbeat, now) }
    }

    /// The same for one that wants something else than to be served.
    #[must_use]
    pub fn with_role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// The same for one that serves its own taps at an address.
    #[must_use]
    pub fn with_taps(self, taps: Option<String>) -> Self {
        Self { taps, ..self }
    }

    /// What it wants of the core.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    fn joins(&self) -> bool {
        self.contact == Contact::Join
    }

    /// Begins the next epoch: its number, and how long to wait before opening sockets. `None` once
    /// the frontend has left.
    pub fn next_open(&mut self, now: Stamp) -> Option<(u64, Duration)> {
        if matches!(self.phase, Phase::Left) {
            return None;
        }
        self.phase = Phase::Opening;
        self.epoch += 1;
        self.stopping = false;
        self.last_tick = now;
        let wait = self.backoff;
        self.backoff = (2 * wait).clamp(BACKOFF_FIRST, BACKOFF_LAST);
        Some((self.epoch, wait))
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

    /// Whether outputs may be taken from the output socket now.
    #[must_use]
    pub fn takes_outputs(&self) -> bool {
        matches!(self.phase, Phase::Up { .. } | Phase::Draining { .. })
    }

    /// When [`FrontendInput::Tick`] is due.
    #[must_use]
    pub fn next_tick(&self) -> Stamp {
        let beat = self.last_tick + self.heartbeat.interval;
        match &self.phase {
            Phase::Draining { until, .. } => beat.min(*until),
            _ => beat,
        }
    }

    /// Takes one input, returns what to do.
    #[must_use]
    pub fn handle(&mut self, now: Stamp, input: FrontendInput) -> Vec<FrontendAction> {
        let mut actions = Vec::new();
        match input {
            FrontendInput::Opened { input, output } if matches!(self.phase, Phase::Opening) => {
                self.phase = Phase::Joining { welcome: None, ready: None, connected: None };
                self.heard = now;
                self.last_tick = now;
                match self.contact {
                    Contact::Join => {}
                    Contact::Handshake => return actions,
                    Contact::Listed { .. } => return vec![FrontendAction::Waiting],
                }
                let (pid, instance, epoch) = (self.pid, self.instance.clone(), self.epoch);
                let (role, taps) = (self.role, self.taps.clone());
                let join = Join { input, output, pid, instance, epoch, role, taps };
                actions.push(FrontendAction::Send(ControlMessage::Join(join)));
            }
            FrontendInput::OpenFailed { reason } if matches!(self.phase, Phase::Opening) => {
                self.refuse(reason, &mut actions);
            }
            FrontendInput::Opened { .. } | FrontendInput::OpenFailed { .. } => self.ignored += 1,
            FrontendInput::Control(message) => self.on_control(now, &message, &mut actions),
            FrontendInput::Handshake { engine_index, ready } => {
                self.on_handshake(now, engine_index, ready, &mut actions);
            }
            FrontendInput::Connected { engine_index, known: told } => {
                if let (Contact::Listed { known, .. }, Phase::Joining { connected, .. }) =
                    (&mut self.contact, &mut self.phase)
                {
                    *known = told.or(known.take());
                    *connected = Some((engine_index, now));
                }
            }
            FrontendInput::Ready { ready, engine_index } => {
                self.on_ready(now, ready, engine_index, &mut actions);
            }
            FrontendInput::Disconnected(socket) => self.on_disconnected(now, socket, &mut actions),
            FrontendInput::Acknowledge(bytes) => {
                if self.joins() && matches!(self.phase, Phase::Up { .. }) {
                    let epoch = self.epoch;
                    actions.push(FrontendAction::Send(ControlMessage::Ack { epoch, bytes }));
                }
            }
            FrontendInput::Leave => match self.phase {
                Phase::Joining { .. } | Phase::Up { .. } if self.joins() => {
                    let epoch = self.epoch;
                    self.phase = Phase::Leaving;
                    actions.push(FrontendAction::Send(ControlMessage::Leave { epoch }));
                }
                Phase::Leaving => {}
                _ => {
                    self.phase = Phase::Left;
                    actions.push(FrontendAction::Close);
                }
            },
            FrontendInput::Tick => self.on_tick(now, &mut actions),
        }
        actions
    }

    fn on_control(&mut self, now: Stamp, message: &[u8], actions: &mut Vec<FrontendAction>) {
        self.heard = now;
        let message = match ControlMessage::decode(message) {
            Ok(message) => message,
            Err(error) => {
                tracing::debug!(%error, "control message dropped");
                self.ignored += 1;
                return;
            }
        };
        match (message, &mut self.phase) {
            (
                ControlMessage::Welcome { client_index, epoch, engine_index },
                Phase::Joining { welcome, .. },
            ) if epoch == self.epoch => {
                *welcome = Some((client_index, engine_index));
                self.try_up(now, actions);
            }
            (ControlMessage::Refused { version, reason }, Phase::Joining { .. }) => {
                let reason = if version == JOIN_VERSION {
                    format!("the core refused the join: {reason}")
                } else {
                    format!(
                        "the core speaks join version {version}, this frontend {JOIN_VERSION}: run \
                         both from the same build ({reason})"
                    )
                };
                self.refuse(reason, actions);
            }
            (
                ControlMessage::Pong { epoch, progress, busy, .. },
                Phase::Up { progress: known, progressed, .. },
            ) if epoch == self.epoch => {
                // An idle core has nothing to make progress with.
                if progress != *known || !busy {
                    *known = progress;
                    *progressed = now;
                }
                self.judge(now, actions);
            }
            (ControlMessage::Pong { .. }, _) => {}
            (ControlMessage::Stopping { epoch }, phase) if epoch == self.epoch => {
                let news = !std::mem::replace(&mut self.stopping, true);
                // One that has not said its ready response yet is up first.
                if news && matches!(phase, Phase::Up { .. }) {
                    actions.push(FrontendAction::Stopping);
                }
            }
            (ControlMessage::Gone { epoch, reason }, _) if epoch == self.epoch => {
                self.drain(now, format!("the core closed the link: {reason}"), actions);
                self.end_drain_if(false, true, actions);
            }
            (ControlMessage::LeaveDone { epoch }, Phase::Leaving) if epoch == self.epoch => {
                self.phase = Phase::Left;
                actions.push(FrontendAction::Close);
            }
            (ControlMessage::Welcome { .. } | ControlMessage::Gone { .. }, _) => {}
            (other, _) => {
                tracing::debug!(?other, "control message makes no sense here");
                self.ignored += 1;
            }
        }
    }

    fn on_ready(
        &mut self,
        now: Stamp,
        frame: Bytes,
        engine_index: u32,
        actions: &mut Vec<FrontendAction>,
    ) {
        match (&mut self.phase, &mut self.contact) {
            (Phase::Joining { ready: slot @ None, welcome, .. }, contact) => {
                if let Contact::Listed { client_index, known } = contact {
                    *welcome = Some((*client_index, engine_index));
                    *known = Some(frame.clone());
                }
                *slot = Some((frame, engine_index));
                self.try_up(now, actions);
            }
            // We took it for one that had come back. What was asked of it is lost, and once it has
            // found the pair anew it is taken for what it is.
            (Phase::Up { .. }, Contact::Listed { known, .. }) if *known != Some(frame.clone()) => {
                *known = Some(frame);
                self.down("another core has come".into(), actions);
            }
            _ => self.ignored += 1,
        }
    }

    fn on_handshake(
        &mut self,
        now: Stamp,
        engine_index: u32,
        is_ready: bool,
        actions: &mut Vec<FrontendAction>,
    ) {
        match &mut self.phase {
            _ if self.contact != Contact::Handshake => self.ignored += 1,
            // A second HELLO comes from an engine that began anew: what the first said is void.
            Phase::Joining { welcome, ready, .. } if !is_ready => {
                (*welcome, *ready) = (None, None);
                actions.push(FrontendAction::SendInit { engine_index });
            }
            Phase::Joining { welcome, .. } => {
                // We list ourselves alone, so our client index is 0.
                *welcome = Some((0, engine_index));
                self.try_up(now, actions);
            }
            _ => {
                tracing::warn!(engine_index, "an engine says HELLO while another serves us");
                self.ignored += 1;
            }
        }
    }

    fn try_up(&mut self, now: Stamp, actions: &mut Vec<FrontendAction>) {
        let Phase::Joining { welcome: Some((client_index, engine_index)), ready, .. } =
            &mut self.phase
        else {
            return;
        };
        let (client_index, engine_index) = (*client_index, *engine_index);
        let Some((ready, _)) = ready.take() else { return };
        self.phase = Phase::Up { progress: 0, progressed: now, hung: false };
        self.backoff = BACKOFF_FIRST;
        self.last_refusal = None;
        actions.push(FrontendAction::Up { ready, client_index, epoch: self.epoch, engine_index });
        if self.stopping {
            actions.push(FrontendAction::Stopping);
        }
    }

    fn on_disconnected(
        &mut self,
        now: Stamp,
        socket: PairSocket,
        actions: &mut Vec<FrontendAction>,
    ) {
        match (&self.phase, socket) {
            (Phase::Leaving, _) => {
                self.phase = Phase::Left;
                actions.push(FrontendAction::Close);
            }
            (Phase::Closed | Phase::Left | Phase::Opening, _) => {}
            (_, _) => {
                self.drain(now, "the core is gone".into(), actions);
                let outputs_ended = socket == PairSocket::Output;
                let told = !self.joins() || socket == PairSocket::Control;
                self.end_drain_if(outputs_ended, told, actions);
            }
        }
    }

    fn on_tick(&mut self, now: Stamp, actions: &mut Vec<FrontendAction>) {
        let beat = now >= self.last_tick + self.heartbeat.interval;
        if let Phase::Draining { until, .. } = self.phase
            && now >= until
        {
            self.end_drain(actions);
            return;
        }
        if !beat {
            return;
        }
        self.last_tick = now;
        if !self.joins() {
            self.take_for_known(now, actions);
            return;
        }
        if matches!(self.phase, Phase::Joining { .. } | Phase::Up { .. }) {
            self.seq += 1;
            let (epoch, seq) = (self.epoch, self.seq);
            actions.push(FrontendAction::Send(ControlMessage::Ping { epoch, seq }));
        }
        self.judge(now, actions);
    }

    /// A core that has our pair without having said its ready response to us has said it to the
    /// process before us: sockets of vLLM's connect anew by themselves, and say nothing.
    fn take_for_known(&mut self, now: Stamp, actions: &mut Vec<FrontendAction>) {
        let Contact::Listed { client_index, known: Some(known) } = &self.contact else { return };
        let Phase::Joining { welcome, ready: slot @ None, connected: Some((engine_index, at)) } =
            &mut self.phase
        else {
            return;
        };
        if now.since(*at) >= READY_PATIENCE {
            tracing::info!(engine_index, "the core is taken for the one that was here before");
            *welcome = Some((*client_index, *engine_index));
            *slot = Some((known.clone(), *engine_index));
            self.try_up(now, actions);
        }
    }

    fn judge(&mut self, now: Stamp, actions: &mut Vec<FrontendAction>) {
        // A core answers only what it is asked, and while this process was stopped it asked
        // nothing: the time before says nothing about the core.
        if self.own_clock.jumped(now, &self.heartbeat) {
            self.heard = now;
            if let Phase::Up { progressed, .. } = &mut self.phase {
                *progressed = now;
            }
        }
        let silent_for = now.since(self.heard);
        let HeartbeatConfig { silence, dead, .. } = self.heartbeat;
        match &mut self.phase {
            Phase::Up { progressed, hung, .. } => {
                let stuck_for = silent_for.max(now.since(*progressed));
                if stuck_for < silence {
                    if std::mem::take(hung) {
                        actions.push(FrontendAction::Resumed);
                    }
                } else if stuck_for >= dead {
                    let reason = format!("the core hung for {} s", stuck_for.as_secs());
                    self.down(reason, actions);
                } else if !std::mem::replace(hung, true) {
                    actions.push(FrontendAction::Hung { silent_for: stuck_for });
                }
            }
            Phase::Joining { .. } if silent_for >= silence => {
                self.down("the core does not answer the join".into(), actions);
            }
            Phase::Leaving if silent_for >= silence => {
                self.phase = Phase::Left;
                actions.push(FrontendAction::Close);
            }
            _ => {}
        }
    }

    fn drain(&mut self, now: Stamp, reason: String, actions: &mut Vec<FrontendAction>) {
        match &mut self.phase {
            Phase::Joining { .. } => self.down(reason, actions),
            Phase::Up { .. } => {
                let until = now + DRAIN;
                self.phase = Phase::Draining { until, reason, outputs_ended: false, told: false };
            }
            // The core's own word says more than a closed socket.
            Phase::Draining { reason: known, told: false, .. } => *known = reason,
            _ => {}
        }
    }

    /// Takes note of what there is nothing more to hear from; over once that is both.
    fn end_drain_if(&mut self, outputs: bool, control: bool, actions: &mut Vec<FrontendAction>) {
        if let Phase::Draining { outputs_ended, told, .. } = &mut self.phase {
            *outputs_ended |= outputs;
            *told |= control;
            if *outputs_ended && *told {
                self.end_drain(actions);
            }
        }
    }

    fn end_drain(&mut self, actions: &mut Vec<FrontendAction>) {
        if let Phase::Draining { reason, .. } = std::mem::replace(&mut self.phase, Phase::Closed) {
            actions.push(FrontendAction::Down { reason });
            actions.push(FrontendAction::Close);
        }
    }

    /// Ends the epoch; says so if it ever was up.
    fn down(&mut self, reason: String, actions: &mut Vec<FrontendAction>) {
        if matches!(self.phase, Phase::Up { .. }) {
            actions.push(FrontendAction::Down { reason });
        } else {
            tracing::debug!(%reason, "a join came to nothing");
        }
        self.phase = Phase::Closed;
        actions.push(FrontendAction::Close);
    }

    /// A join that cannot succeed as things are: told once per reason, tried again slowly.
    fn refuse(&mut self, reason: String, actions: &mut Vec<FrontendAction>) {
        if self.last_refusal.as_ref() != Some(&reason) {
            tracing::warn!(%reason, "join refused");
            self.last_refusal = Some(reason.clone());
            actions.push(FrontendAction::Down { reason });
        }
        self.backoff = BACKOFF_LAST;
        self.phase = Phase::Closed;
        actions.push(FrontendAction::Close);
    }
}
