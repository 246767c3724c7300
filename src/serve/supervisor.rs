//! The supervisor at work: child processes, what they say, and what is done about it.

use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;
use pawl_shared::clock::{Clock, Stamp, SystemClock};
use pawl_shared::lifeline::Heard;
use pawl_shared::ready;
use pawl_shared::shutdown::Shutdown;
use pawl_shared::transport::{HandshakeDesk, HeartbeatConfig};
use tokio::sync::mpsc;

use super::child::{self, Child, ChildSpec};
use super::fleet::{Action, Fleet, Life, Role};

/// What children have said and nobody has looked at. When it is full their lines are not read.
const HEARD_MAX: usize = 256;

/// How long children may take to abort what is under way when the shutdown is hurried.
const HURRIED_GRACE: Duration = Duration::from_secs(2);

/// How long the last words of a child may take to be read once it has ended: they lie in its line.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The children: api-servers, and their engine-core if it is not started elsewhere.
pub struct Supervisor {
    children: Vec<Child>,
    fleet: Fleet,
    /// Each child's present life.
    lives: Vec<Life>,
    lines: Lines,
    hear: mpsc::Sender<(Life, Heard)>,
    told_ready: bool,
    /// Where a core that is started elsewhere dials in.
    desk: Option<HandshakeDesk>,
}

/// The lines of all children.
struct Lines {
    heard: mpsc::Receiver<(Life, Heard)>,
    /// The life of each place whose line has ended last.
    ended: Vec<Option<Life>>,
}

impl Lines {
    /// Cancel-safe.
    async fn next(&mut self) -> Option<(Life, Heard)> {
        let (life, heard) = self.heard.recv().await?;
        if heard == Heard::End {
            self.ended[life.slot] = Some(life);
        }
        Some((life, heard))
    }

    /// `None` once the line of `of` has ended, which may be before its process has.
    async fn next_until_end(&mut self, of: Life) -> Option<(Life, Heard)> {
        if self.ended[of.slot] == Some(of) { None } else { self.next().await }
    }
}

fn now() -> Stamp {
    SystemClock.now()
}

impl Supervisor {
    /// Starts them all. `heartbeat` says how long a core may hang.
    ///
    /// # Errors
    /// When a process cannot be started; those before it end with their lines.
    pub fn start(specs: Vec<ChildSpec>, heartbeat: HeartbeatConfig) -> anyhow::Result<Self> {
        let (hear, heard) = mpsc::channel(HEARD_MAX);
        let roles: Vec<Role> = specs.iter().map(ChildSpec::role).collect();
        let mut fleet = Fleet::new(&roles, heartbeat, now());
        let mut children = Vec::new();
        let mut lives = Vec::new();
        for (slot, spec) in specs.into_iter().enumerate() {
            let life = fleet.started(slot, now());
            children.push(Child::start(spec, life, hear.clone())?);
            lives.push(life);
        }
        let lines = Lines { heard, ended: vec![None; lives.len()] };
        Ok(Self { children, fleet, lives, lines, hear, told_ready: false, desk: None })
    }

    /// From now on lets in cores that dial `desk`, whenever the api-servers wait for one.
    pub fn let_cores_in(&mut self, desk: HandshakeDesk) {
        desk.let_in(self.fleet.awaits_core());
        self.desk = Some(desk);
    }

    /// How many children there are.
    pub fn count(&self) -> usize {
        self.children.len()
    }

    /// The name of a child, for logs.
    pub fn name(&self, index: usize) -> &str {
        self.children[index].name()
    }

    /// Waits until a child ends: which, and how. Meanwhile children are listened to, and one that
    /// hangs is killed.
    pub async fn next_exit(&mut self) -> (usize, ExitStatus) {
        loop {
            let due = self.fleet.deadline().since(now());
            let actions = tokio::select! {
                (index, status) = child::first_exit(&mut self.children) => {
                    self.last_words(self.lives[index]).await;
                    return (index, status);
                }
                Some((life, heard)) = self.lines.next() => self.fleet.heard(life, heard, now()),
                () = tokio::time::sleep(due) => self.fleet.tick(now()),
            };
            self.act(actions);
        }
    }

    /// Starts a child that has ended again.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        let life = self.fleet.started(index, now());
        let spec = self.children[index].spec().clone();
        self.children[index] = Child::start(spec, life, self.hear.clone())?;
        self.lives[index] = life;
        Ok(())
    }

    /// Whether an end with `status` is a start that failed: the child gave up by itself before it
    /// was ever ready. Its settings, its model or this machine are the cause, and it would give up
    /// again.
    pub fn failed_to_start(&self, index: usize, status: ExitStatus) -> bool {
        let gave_up = status.code().is_some_and(|code| code != 0);
        gave_up && !self.fleet.was_ready(index)
    }

    /// Asks the children of a role to stop and waits for them at most `patience`, and not for long
    /// once `shutdown` is hurried; then kills the rest. No core is let in any more.
    pub async fn stop(&mut self, role: Role, patience: Duration, shutdown: &Shutdown) {
        self.desk = None;
        self.signal(role, Signal::SIGTERM);
        let given = tokio::select! {
            () = self.all_ended(role) => return,
            () = tokio::time::sleep(patience) => patience,
            () = shutdown.hurried() => {
                self.signal(role, Signal::SIGQUIT);
                if tokio::time::timeout(HURRIED_GRACE, self.all_ended(role)).await.is_ok() {
                    return;
                }
                HURRIED_GRACE
            }
        };
        for child in self.living(role) {
            tracing::warn!("{} did not stop within {given:?}: killing it", child.name());
            child.signal(Signal::SIGKILL);
        }
        self.all_ended(role).await;
    }

    fn living(&self, role: Role) -> impl Iterator<Item = &Child> {
        self.children.iter().filter(move |child| child.role() == role && !child.ended())
    }

    fn signal(&self, role: Role, signal: Signal) {
        self.living(role).for_each(|child| child.signal(signal));
    }

    async fn all_ended(&mut self, role: Role) {
        while self.living(role).next().is_some() {
            self.next_exit().await;
        }
    }

    /// Takes what a process that has ended had still said.
    async fn last_words(&mut self, of: Life) {
        let read = async {
            while let Some((life, heard)) = self.lines.next_until_end(of).await {
                let actions = self.fleet.heard(life, heard, now());
                self.act(actions);
            }
        };
        // A descendant of the child might hold its line open.
        let _ = tokio::time::timeout(LAST_WORDS, read).await;
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(index, message) => self.children[index].send(&message),
                Action::Kill(index, why) => {
                    let child = &self.children[index];
                    tracing::error!("{} hangs, {why}: killing it", child.name());
                    child.signal(Signal::SIGKILL);
                }
            }
        }
        if let Some(desk) = &self.desk {
            desk.let_in(self.fleet.awaits_core());
        }
        if !self.told_ready && (0..self.count()).all(|index| self.fleet.was_ready(index)) {
            self.told_ready = true;
            ready::tell();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sender stays, as that of the supervisor does: what waits for an end that has passed
    /// would wait for ever.
    #[tokio::test]
    async fn last_words_end_with_the_line_whether_it_ends_before_the_process_or_after() {
        let life = |number| Life { slot: 1, number };
        let (hear, heard) = mpsc::channel(HEARD_MAX);
        let mut lines = Lines { heard, ended: vec![None; 2] };
        for (of, ends_first) in [(life(1), true), (life(2), false), (life(3), true)] {
            hear.send((of, Heard::End)).await.unwrap();
            if ends_first {
                assert_eq!(lines.next().await, Some((of, Heard::End)));
            } else {
                assert_eq!(lines.next_until_end(of).await, Some((of, Heard::End)));
            }
            let rest = tokio::time::timeout(LAST_WORDS, lines.next_until_end(of)).await;
            assert_eq!(rest, Ok(None));
        }
    }
}
