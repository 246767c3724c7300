//! The Vulkan device: a model's programs compiled once to dispatches over buffers that stay, and
//! steps that are one submission each.
//!
//! The kernels are the WGSL files of `shaders/`. What an adapter can do decides which of them run
//! ([`adapter`]); what a program needs decides the dispatches ([`program`]). In the steady state
//! nothing is made: a step writes what the host tells into one buffer, encodes the dispatches, and
//! copies what the host wants into a buffer that it can map. Tokens that the device samples are
//! also its own next input, so that the next step can be submitted before they are read.

pub mod adapter;
mod buffers;
mod kernels;
mod program;
mod steps;
#[cfg(test)]
mod tests;
mod weights;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

pub use adapter::{AdapterKind, Offer, Path, Wanted, choose};
use buffers::{Buffers, Resident};
use kernels::{Pipelines, Source};
use program::{Dispatch, Shapes, WeightShape};
pub use steps::{IN_SLOT, Submission, Told};

use crate::device::cpu::{KvDtype, block_bytes};
use crate::device::{
    AttentionSpec, DeviceError, Program, RopeSpec, Rows, TensorId, TensorTable, WeightSource,
};

/// Rows whose logits one submission computes, at most.
const TAKEN_MAX: usize = 128;
/// Block ids that one submission takes.
const TABLES_MAX: usize = 1 << 18;

/// An adapter, opened.
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    /// What it offers.
    pub offer: Offer,
    /// The first failure that nobody waited for.
    failure: Failure,
}

/// Why the device cannot go on, once it cannot.
#[derive(Clone, Debug, Default)]
struct Failure(Arc<Mutex<Option<String>>>);

impl Failure {
    fn set(&self, reason: String) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.get_or_insert(reason);
    }

    fn check(&self) -> Result<(), DeviceError> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map_or(Ok(()), |reason| Err(DeviceError::Vulkan(reason.clone())))
    }
}

/// The adapters of this machine and what each offers, in the order that `--device vulkan:N` counts.
#[must_use]
pub fn list() -> Vec<Offer> {
    adapters().iter().map(offer).collect()
}

fn adapters() -> Vec<wgpu::Adapter> {
    let descriptor = wgpu::InstanceDescriptor {
        backends: wgpu::Backends::VULKAN,
        // No layers of a development kit that happen to be installed.
        flags: wgpu::InstanceFlags::empty(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    };
    ready(wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::VULKAN))
}

/// The value of a future that waits for nothing: those of native devices are made ready.
fn ready<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::yield_now();
    }
}

fn offer(adapter: &wgpu::Adapter) -> Offer {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    Offer {
        name: info.name.clone(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
            wgpu::DeviceType::VirtualGpu => AdapterKind::Virtual,
            wgpu::DeviceType::Cpu => AdapterKind::Software,
            wgpu::DeviceType::Other => AdapterKind::Unknown,
        },
        memory_bytes: memory_bytes(adapter),
        binding_bytes: limits.max_storage_buffer_binding_size,
        buffer_bytes: limits.max_buffer_size,
        invocations: limits.max_compute_invocations_per_workgroup,
        workgroup_bytes: limits.max_compute_workgroup_storage_size,
        storage_buffers: limits.max_storage_buffers_per_shader_stage,
        subgroup: features
            .contains(wgpu::Features::SUBGROUP)
            .then_some((info.subgroup_min_size, info.subgroup_max_size)),
        timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        pipeline_cache: features.contains(wgpu::Features::PIPELINE_CACHE),
    }
}

/// Bytes of the largest heap of the device's own memory; 0 where the driver does not say.
fn memory_bytes(adapter: &wgpu::Adapter) -> u64 {
    // SAFETY: the handles are used only while the adapter lives, to read what does not change.
    let heaps = unsafe {
        let Some(raw) = adapter.as_hal::<wgpu::hal::api::Vulkan>() else { return 0 };
        let instance = raw.shared_instance().raw_instance();
        instance.get_physical_device_memory_properties(raw.raw_physical_device())
    };
    let heaps = &heaps.memory_heaps[..heaps.memory_heap_count as usize];
    // Bit 0 of the flags: DEVICE_LOCAL.
    let local = heaps.iter().filter(|heap| heap.flags.as_raw() & 1 != 0);
    local.map(|heap| heap.size).max().unwrap_or(0)
}

impl Gpu {
    /// Opens the adapter that [`list`] tells at `index`.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] in the driver's words.
    pub fn open(index: usize) -> Result<Self, DeviceError> {
        let adapter = adapters()
            .into_iter()
            .nth(index)
            .ok_or_else(|| DeviceError::Vulkan(format!("adapter {index} is gone")))?;
        let offer = offer(&adapter);
        let wanted = wgpu::Features::SUBGROUP | wgpu::Features::TIMESTAMP_QUERY;
        let (device, queue) = ready(adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("pawl"),
            required_features: adapter.features() & wanted,
            required_limits: adapter.limits(),
            ..wgpu::DeviceDescriptor::default()
        }))
        .map_err(|error| DeviceError::Vulkan(format!("cannot open {}: {error}", offer.name)))?;
        let failure = Failure::default();
        let uncaught = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            uncaught.set(error.to_string());
        }));
        let lost = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            lost.set(format!("the device is lost ({reason:?}): {message}"));
        });
        Ok(Self { device, queue, offer, failure })
    }

    /// Runs `work`, and turns what the device finds wrong with it into an error about `what`.
    fn scoped<T>(&self, what: &str, work: impl FnOnce() -> T) -> Result<T, DeviceError> {
        use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
        let scopes = [Internal, Validation, OutOfMemory].map(|f| self.device.push_error_scope(f));
        let value = work();
        let mut found = None;
        for scope in scopes.into_iter().rev() {
            found = ready(scope.pop()).or(found);
        }
        match found {
            None => Ok(value),
            Some(error) => Err(DeviceError::Vulkan(format!("{what}: {error}"))),
        }
    }

    fn pipeline(
        &self,
        source: &Source,
        layout: &wgpu::BindGroupLayout,
    ) -> Result<wgpu::ComputePipeline, DeviceError> {
        let what = format!("the shader {} does not compile", source.file);
        self.scoped(&what, || {
            let descriptor = wgpu::ShaderModuleDescriptor {
                label: Some(source.entry),
                source: wgpu::ShaderSource::Wgsl(source.text.into()),
            };
            let checks = wgpu::ShaderRuntimeChecks {
                force_loop_bounding: false,
                ..wgpu::ShaderRuntimeChecks::checked()
            };
            // SAFETY: every loop of the shaders counts up to a bound, or halves down to zero. The
            // counter that would guard them otherwise keeps a compiler from unrolling.
            let module = unsafe { self.device.create_shader_module_trusted(descriptor, checks) };
            let pipeline_layout =
                self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                    label: None,
                    bind_group_layouts: &[Some(layout)],
                    immediate_size: 0,
                });
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(source.entry),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(source.entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &source.constants,
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        })
    }

    fn buffer(&self, what: &'static str, bytes: u64, usage: wgpu::BufferUsages) -> Allocation {
        let size = bytes.max(16).next_multiple_of(16);
        if size > self.offer.buffer_bytes {
            return Err(DeviceError::Shape {
                what: format!("the buffer of {what}"),
                found: size as usize,
                need: format!("this adapter's buffers have {} bytes", self.offer.buffer_bytes),
            });
        }
        self.scoped(&format!("cannot allocate {size} bytes for {what}"), || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage,
                mapped_at_creation: false,
            })
        })
    }
}

type Allocation = Result<wgpu::Buffer, DeviceError>;

/// What a device is made for.
#[derive(Clone, Debug)]
pub struct VulkanDeviceConfig {
    /// Shape of attention and its cache.
    pub attention: AttentionSpec,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Activations that programs name.
    pub tensors: TensorTable,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks, block 0 included.
    pub num_blocks: usize,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Slots for tokens that the device keeps: as many as requests that it may know at once.
    pub slots: usize,
}

/// The two programs of a model.
#[derive(Clone, Copy, Debug)]
pub struct Programs<'a> {
    /// Over all tokens.
    pub body: &'a Program,
    /// Over those rows that sample.
    pub head: &'a Program,
    /// What the head computes.
    pub logits: TensorId,
}

/// See the module.
pub struct VulkanDevice {
    gpu: Gpu,
    path: Path,
    resident: Resident,
    vocab_size: usize,
    tokens_max: usize,
    taken_max: usize,
    steps: steps::Steps,
    timing: Option<steps::Timing>,
    weight_bytes: u64,
    products: Products,
    layers: usize,
}

/// Bytes of the weights that a step multiplies with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Products {
    /// As the device holds them.
    pub bytes: u64,
    /// As the file does.
    pub file_bytes: u64,
}

/// Bytes that `num_blocks` blocks of all layers take, and the most blocks of which a layer's keys
/// can be seen at once.
#[must_use]
pub fn blocks_max(attention: &AttentionSpec, block_size: usize, offer: &Offer) -> u64 {
    let half_a_layer = block_bytes(attention, block_size, KvDtype::F16) / (2 * attention.layers);
    offer.binding_bytes.min(offer.buffer_bytes) / half_a_layer as u64
}

impl VulkanDevice {
    /// Compiles the programs, packs and uploads `weights` and allocates the rest. `loaded` is told
    /// the bytes of the file as they are done.
    ///
    /// # Errors
    /// [`DeviceError`] for an encoding, a shape or a program that the kernels do not take, and for
    /// whatever the device refuses.
    pub fn load(
        gpu: Gpu,
        config: &VulkanDeviceConfig,
        programs: Programs<'_>,
        sources: &[WeightSource<'_>],
        loaded: &mut dyn FnMut(u64),
    ) -> Result<Self, DeviceError> {
        let path = gpu.offer.path();
        check_head(&config.attention)?;
        let shape = |source: &WeightSource<'_>| {
            let kind = weights::check(source)?;
            Ok(WeightShape { kind, rows: source.rows, cols: source.cols })
        };
        let shapes = sources.iter().map(shape).collect::<Result<Vec<_>, DeviceError>>()?;
        let shapes = Shapes {
            weights: &shapes,
            tensors: &config.tensors,
            attention: config.attention,
            rotated: config.rope.frequencies.len(),
            block_size: config.block_size,
            binding_bytes: gpu.offer.binding_bytes.min(gpu.offer.buffer_bytes),
        };
        let compiled = program::compile(programs.body, programs.head, programs.logits, &shapes)?;
        let dispatches = || compiled.body.iter().chain(&compiled.head);
        let kernels: BTreeSet<_> = dispatches().flat_map(Dispatch::kernels).collect();
        let pipelines = Pipelines::compile(&gpu, &kernels, path)?;
        let vocab_size = config.tensors.shapes[programs.logits.0].0;
        let widest = compiled.buffers.iter().flatten();
        let widest = widest.filter(|(_, rows)| *rows == Rows::Tokens).map(|(width, _)| 4 * width);
        let rows_max = |width: usize| shapes.binding_bytes as usize / width.max(1);
        let tokens_max = path.tokens_max.min(rows_max(widest.max().unwrap_or(4)));
        let taken_max = TAKEN_MAX.min(rows_max(4 * vocab_size)).min(tokens_max);
        let buffers = Buffers::new(&gpu, config, &compiled, [tokens_max, taken_max], sources)?;
        let weight_bytes = buffers.upload(&gpu, &compiled, sources, loaded)?;
        let resident = buffers.bind(&gpu, pipelines, &compiled)?;
        let timing = steps::Timing::new(&gpu)?;
        gpu.failure.check()?;
        Ok(Self {
            gpu,
            path,
            resident,
            vocab_size,
            tokens_max,
            taken_max,
            steps: steps::Steps::default(),
            timing,
            weight_bytes,
            products: buffers::products(&compiled, sources),
            layers: config.attention.layers,
        })
    }

    /// Bytes of the weights that a step which samples multiplies with.
    #[must_use]
    pub fn products(&self) -> Products {
        self.products
    }

    /// Dispatches of each layer, which all have the same.
    #[must_use]
    pub fn dispatches_per_layer(&self) -> usize {
        self.resident.body.len() / self.layers.max(1)
    }

    /// The adapter.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.gpu.offer
    }

    /// How the kernels run.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// Rows of one submission.
    #[must_use]
    pub fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    /// Rows of one submission whose logits are wanted.
    #[must_use]
    pub fn taken_max(&self) -> usize {
        self.taken_max
    }

    /// Block ids of one submission.
    #[must_use]
    pub fn tables_max(&self) -> usize {
        TABLES_MAX
    }

    /// Bytes of weights on the device.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Takes the device away, as a driver that resets it would.
    #[cfg(test)]
    pub(crate) fn lose(&self) {
        self.gpu.device.destroy();
    }

    /// Dispatches of a step that samples.
    #[must_use]
    pub fn num_dispatches(&self) -> usize {
        self.resident.body.len() + self.resident.head.len()
    }

    /// Pipelines compiled.
    #[must_use]
    pub fn num_pipelines(&self) -> usize {
        self.resident.pipelines.count()
    }
}

fn check_head(attention: &AttentionSpec) -> Result<(), DeviceError> {
    let found = attention.head_dim;
    if found.is_multiple_of(8) && (8..=256).contains(&found) {
        return Ok(());
    }
    Err(DeviceError::Shape {
        what: "the model's head dimension".to_owned(),
        found,
        need: "the Vulkan device needs a multiple of 8, up to 256".to_owned(),
    })
}
