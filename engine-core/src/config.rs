//! What a core is told when it starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pawl_shared::clock::{Clock, SystemClock};
use pawl_shared::transport::{Address, HeartbeatConfig};
use tokio::sync::watch;

use crate::runner::cpu::{CpuConfig, LoadProgress};
use crate::runner::mock::MockConfig;
use crate::scheduler::SchedulerConfig;
use crate::step::Progress;

/// Everything [`crate::run`] needs. Flags are turned into it by the command.
#[derive(Clone)]
pub struct CoreConfig {
    /// Where frontends may join.
    pub listen: Vec<Address>,
    /// Handshake sockets of vLLM frontends to dial.
    pub handshake: Vec<Address>,
    /// Carried in identities, frames and logs.
    pub engine_index: u32,
    /// What runs the steps.
    pub runner: RunnerChoice,
    /// The model's GGUF file. The mock runner needs none, and takes its card from one if given.
    pub model: Option<PathBuf>,
    /// Names by which clients may ask for the model, the first being the one answered with. Empty:
    /// the names in the model's card.
    pub served_model_names: Vec<String>,
    /// How steps are planned. Its `max_model_len` is set from the field below.
    pub scheduler: SchedulerConfig,
    /// Longest sequence; `None`: what the model and the cache allow.
    pub max_model_len: Option<u32>,
    /// Whether equal beginnings of prompts are computed once.
    pub prefix_caching: bool,
    /// Steps that may be in flight at once; `None`: 2 where the runner overlaps them, else 1.
    pub depth: Option<u32>,
    /// Seeds the requests that bring no seed of their own.
    pub seed: u64,
    /// On shutdown, how long admitted requests may go on. Zero ends them at once.
    pub shutdown_timeout: Duration,
    /// When a silent frontend counts as gone.
    pub heartbeat: HeartbeatConfig,
    /// Is told how far loading has come, after each weight.
    pub on_load: Arc<dyn Fn(LoadProgress) + Send + Sync>,
    /// How the core does, for whoever started it.
    pub vitals: Vitals,
    /// The time.
    pub clock: Arc<dyn Clock>,
}

/// How a core does, to be looked at from any thread. Clones are of the same core.
#[derive(Clone, Debug, Default)]
pub struct Vitals {
    /// Grows with each thing the core finishes, and a few times a second while it has nothing to
    /// do. Only a core that hangs lets it stand still.
    pub progress: Progress,
    /// True once the model is loaded and requests are served.
    pub ready: watch::Sender<bool>,
}

impl Default for CoreConfig {
    /// A core on the mock runner that listens nowhere.
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            handshake: Vec::new(),
            engine_index: 0,
            runner: RunnerChoice::Mock(MockConfig::default()),
            model: None,
            served_model_names: Vec::new(),
            scheduler: SchedulerConfig::default(),
            max_model_len: None,
            prefix_caching: true,
            depth: None,
            seed: 0,
            shutdown_timeout: Duration::ZERO,
            heartbeat: HeartbeatConfig::default(),
            vitals: Vitals::default(),
            on_load: Arc::new(|_| ()),
            clock: Arc::new(SystemClock),
        }
    }
}

impl CoreConfig {
    /// A core on the mock runner, listening at `listen`.
    #[must_use]
    pub fn for_test(listen: Address, mock: MockConfig) -> Self {
        Self { listen: vec![listen], runner: RunnerChoice::Mock(mock), ..Self::default() }
    }
}

/// What runs the steps.
#[derive(Clone, Debug)]
pub enum RunnerChoice {
    /// Made-up tokens, no model.
    Mock(MockConfig),
    /// The model, on this machine's cores.
    Cpu(CpuConfig),
    /// The model, on a Vulkan device.
    #[cfg(feature = "vulkan")]
    Vulkan(crate::runner::vulkan::VulkanConfig),
}
