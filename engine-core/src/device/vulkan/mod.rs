//! The Vulkan device: a model's programs compiled once to dispatches over buffers that stay, and
//! steps that are one submission each.
//!
//! The kernels are the WGSL files of `shaders/`. What an adapter can do decides which of them run
//! ([`adapter`]); what a program needs decides the dispatches ([`program`]). In the steady state
//! nothing is made: a step writes what the host tells into one buffer, encodes the dispatches, and
//! copies what the host wants into a buffer that it can map. Tokens that the device samples are
//! also its own next input, so that the next step can be submitted before they are read.

pub mod adapter;
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
use kernels::{Pipelines, Source};
use program::{Bound, Compiled, Dispatch, Groups, Shapes, WeightShape};
pub use steps::{IN_SLOT, Submission, Told};

use crate::device::cpu::{KvDtype, block_bytes};
use crate::device::{
    AttentionSpec, DeviceError, Program, RopeSpec, Rows, TensorId, TensorTable, WeightSource,
};

/// Bytes of weights that are packed before they go to the device.
const UPLOAD_BYTES: usize = 4 << 20;
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

/// Kernels, buffers and bind groups of a model.
struct Resident {
    pipelines: Pipelines,
    body: Vec<Ready>,
    head: Vec<Ready>,
    step: wgpu::Buffer,
    told: wgpu::Buffer,
    logits: wgpu::Buffer,
}

/// A dispatch with its bind group.
struct Ready {
    kernel: kernels::Kernel,
    groups: Groups,
    bind_group: wgpu::BindGroup,
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
    weight_bytes: u64,
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
        gpu.failure.check()?;
        Ok(Self {
            gpu,
            path,
            resident,
            vocab_size,
            tokens_max,
            taken_max,
            steps: steps::Steps::default(),
            weight_bytes,
        })
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

/// All memory of a model, before it is bound.
struct Buffers {
    /// `[matrix][part]`, with the offset of the scales.
    matrices: Vec<Vec<(wgpu::Buffer, u64)>>,
    /// By weight, for vectors.
    vectors: Vec<Option<wgpu::Buffer>>,
    activations: Vec<Option<wgpu::Buffer>>,
    keys: Vec<wgpu::Buffer>,
    values: Vec<wgpu::Buffer>,
    angles: wgpu::Buffer,
    step: wgpu::Buffer,
    sampled: wgpu::Buffer,
    told: wgpu::Buffer,
}

const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST);

impl Buffers {
    fn new(
        gpu: &Gpu,
        config: &VulkanDeviceConfig,
        compiled: &Compiled,
        [tokens_max, taken_max]: [usize; 2],
        sources: &[WeightSource<'_>],
    ) -> Result<Self, DeviceError> {
        let align = u64::from(gpu.device.limits().min_storage_buffer_offset_alignment);
        let part = |matrix: &program::Matrix, tiles: usize| {
            let blocks = matrix.cols / crate::device::cpu::packed::BLOCK;
            let values = (tiles * weights::value_bytes(matrix.kind, blocks)) as u64;
            let scales_at = values.next_multiple_of(align);
            let scales = (tiles * weights::scale_bytes(matrix.kind, blocks)) as u64;
            Ok((gpu.buffer("weights", scales_at + scales, STORAGE)?, scales_at))
        };
        let matrix = |matrix: &program::Matrix| {
            matrix.parts.iter().map(|&(_, tiles)| part(matrix, tiles)).collect()
        };
        let vector = |source: &WeightSource<'_>| {
            let bytes = 4 * source.cols as u64;
            (source.rows == 1).then(|| gpu.buffer("a vector", bytes, STORAGE)).transpose()
        };
        let of_rows = |&buffer: &Option<(usize, Rows)>| {
            let usage = STORAGE | wgpu::BufferUsages::COPY_SRC;
            let bytes = |(width, rows): (usize, Rows)| match rows {
                Rows::Tokens => 4 * (width * tokens_max) as u64,
                Rows::Taken => 4 * (width * taken_max) as u64,
            };
            buffer.map(|buffer| gpu.buffer("activations", bytes(buffer), usage)).transpose()
        };
        let spec = &config.attention;
        let of_layer = block_bytes(spec, config.block_size, KvDtype::F16) / (2 * spec.layers);
        let cache = |_| gpu.buffer("the KV cache", (of_layer * config.num_blocks) as u64, STORAGE);
        let rotated = config.rope.frequencies.len();
        let step_words = 4 + 4 * tokens_max + 2 * taken_max + TABLES_MAX;
        let buffers = Self {
            matrices: compiled.matrices.iter().map(matrix).collect::<Result<_, _>>()?,
            vectors: sources.iter().map(vector).collect::<Result<_, _>>()?,
            activations: compiled.buffers.iter().map(of_rows).collect::<Result<_, _>>()?,
            keys: (0..spec.layers).map(cache).collect::<Result<_, _>>()?,
            values: (0..spec.layers).map(cache).collect::<Result<_, _>>()?,
            angles: gpu.buffer(
                "rotations",
                8 * (config.max_model_len * rotated) as u64,
                STORAGE,
            )?,
            step: gpu.buffer("a step", 4 * step_words as u64, STORAGE)?,
            sampled: gpu.buffer("sampled tokens", 4 * config.slots as u64, STORAGE)?,
            told: gpu.buffer(
                "tokens for the host",
                8 * taken_max as u64,
                STORAGE | wgpu::BufferUsages::COPY_SRC,
            )?,
        };
        let mut angles = vec![0.0_f32; 2 * config.max_model_len * rotated];
        for (position, row) in angles.chunks_exact_mut((2 * rotated).max(1)).enumerate() {
            crate::device::cpu::rope_angles(position, &config.rope.frequencies, row);
        }
        gpu.queue.write_buffer(&buffers.angles, 0, bytemuck::cast_slice(&angles));
        Ok(buffers)
    }

    /// Packs tile by tile, so that the host never holds more than a few megabytes of weights that
    /// are not the file's own pages.
    fn upload(
        &self,
        gpu: &Gpu,
        compiled: &Compiled,
        sources: &[WeightSource<'_>],
        loaded: &mut dyn FnMut(u64),
    ) -> Result<u64, DeviceError> {
        let mut total = 0;
        let flush = || -> Result<(), DeviceError> {
            gpu.queue.submit([]);
            let waited = gpu.device.poll(wgpu::PollType::wait_indefinitely());
            waited.map_err(|error| DeviceError::Vulkan(error.to_string()))?;
            gpu.failure.check()
        };
        for (index, vector) in self.vectors.iter().enumerate() {
            if let Some(buffer) = vector {
                let values = crate::device::cpu::vector_values(&sources[index])?;
                gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(&values));
                total += 4 * values.len() as u64;
                loaded(sources[index].data.len() as u64);
            }
        }
        let (mut values, mut scales) = (Vec::new(), Vec::new());
        let mut told = BTreeSet::new();
        for (matrix, parts) in compiled.matrices.iter().zip(&self.matrices) {
            let blocks = matrix.cols / crate::device::cpu::packed::BLOCK;
            let tile_values = weights::value_bytes(matrix.kind, blocks);
            let tile_scales = weights::scale_bytes(matrix.kind, blocks);
            let at_once = (UPLOAD_BYTES / tile_values).max(1);
            for (&(first, tiles), (buffer, scales_at)) in matrix.parts.iter().zip(parts) {
                for from in (0..tiles).step_by(at_once) {
                    let count = at_once.min(tiles - from);
                    values.clear();
                    values.resize(count * tile_values / 4, 0_u32);
                    scales.clear();
                    scales.resize(count * tile_scales / 4, 0_u32);
                    for tile in 0..count {
                        weights::pack_tile(
                            &matrix.rows,
                            sources,
                            matrix.kind,
                            first + from + tile,
                            &mut values[tile * tile_values / 4..][..tile_values / 4],
                            &mut scales[tile * tile_scales / 4..][..tile_scales / 4],
                        );
                    }
                    let (values, scales): (&[u8], &[u8]) =
                        (bytemuck::cast_slice(&values), bytemuck::cast_slice(&scales));
                    gpu.queue.write_buffer(buffer, (from * tile_values) as u64, values);
                    if !scales.is_empty() {
                        let at = scales_at + (from * tile_scales) as u64;
                        gpu.queue.write_buffer(buffer, at, scales);
                    }
                    flush()?;
                }
                total += (tiles * (tile_values + tile_scales)) as u64;
            }
            for &weight in &matrix.rows.weights {
                if told.insert(weight) {
                    loaded(sources[weight].data.len() as u64);
                }
            }
        }
        flush()?;
        Ok(total)
    }

    fn bind(
        self,
        gpu: &Gpu,
        pipelines: Pipelines,
        compiled: &Compiled,
    ) -> Result<Resident, DeviceError> {
        let dispatches: Vec<_> = compiled.body.iter().chain(&compiled.head).collect();
        // Every shape in a slot of its own of one buffer.
        let align = gpu.device.limits().min_uniform_buffer_offset_alignment as usize;
        let slot = align.max(64);
        let mut shapes = vec![0_u8; slot * dispatches.len()];
        for (dispatch, slot) in dispatches.iter().zip(shapes.chunks_exact_mut(slot)) {
            let bytes: &[u8] = bytemuck::cast_slice(&dispatch.shape);
            slot[..bytes.len()].copy_from_slice(bytes);
        }
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let uniform = gpu.buffer("shapes", shapes.len() as u64, usage)?;
        gpu.queue.write_buffer(&uniform, 0, &shapes);
        let bind = |(index, dispatch): (usize, &&Dispatch)| {
            let source = dispatch.kernel.source(pipelines.path());
            let entries: Vec<_> = source
                .bindings
                .iter()
                .zip(&dispatch.bound)
                .map(|(&(binding, _), bound)| wgpu::BindGroupEntry {
                    binding,
                    resource: match bound {
                        Bound::Shape => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                            buffer: &uniform,
                            offset: (index * slot) as u64,
                            size: std::num::NonZero::new(4 * dispatch.shape.len() as u64),
                        }),
                        bound => self.resource(bound),
                    },
                })
                .collect();
            let bind_group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(source.entry),
                layout: pipelines.layout(dispatch.kernel),
                entries: &entries,
            });
            Ready { kernel: dispatch.kernel, groups: dispatch.groups, bind_group }
        };
        let mut ready: Vec<Ready> = gpu.scoped("cannot bind the buffers", || {
            dispatches.iter().enumerate().map(bind).collect()
        })?;
        let head = ready.split_off(compiled.body.len());
        let logits = self.activations[compiled.logits.buffer].clone();
        Ok(Resident {
            pipelines,
            body: ready,
            head,
            step: self.step,
            told: self.told,
            logits: logits.expect("the head writes the logits"),
        })
    }

    fn resource(&self, bound: &Bound) -> wgpu::BindingResource<'_> {
        let buffer = match *bound {
            Bound::Shape => unreachable!("shapes are bound by their slot"),
            Bound::Step => &self.step,
            Bound::Sampled => &self.sampled,
            Bound::Told => &self.told,
            Bound::Angles => &self.angles,
            Bound::Activations(index) => {
                self.activations[index].as_ref().expect("buffers that dispatches name are made")
            }
            Bound::Vector(weight) => {
                self.vectors[weight.0].as_ref().expect("a vector is used as one")
            }
            Bound::Keys(layer) => &self.keys[layer],
            Bound::KvValues(layer) => &self.values[layer],
            Bound::Values { matrix, part } => {
                let (buffer, scales_at) = &self.matrices[matrix][part];
                return wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset: 0,
                    size: std::num::NonZero::new(*scales_at),
                });
            }
            Bound::Scales { matrix, part } => {
                let (buffer, scales_at) = &self.matrices[matrix][part];
                // Kinds without scales bind what their kernels do not read.
                let offset = if *scales_at < buffer.size() { *scales_at } else { 0 };
                return wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset,
                    size: None,
                });
            }
        };
        buffer.as_entire_binding()
    }
}
