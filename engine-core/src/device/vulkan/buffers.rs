//! Memory of a model on the device: made, filled and bound once.

use std::collections::BTreeSet;

use super::kernels::{Kernel, Pipelines};
use super::program::{Bound, Compiled, Dispatch, Groups, Matrix};
use super::{Gpu, Products, TABLES_MAX, VulkanDeviceConfig, weights};
use crate::device::cpu::packed::BLOCK;
use crate::device::cpu::{KvDtype, block_bytes, rope_angles, vector_values};
use crate::device::{DeviceError, Rows, WeightSource};

/// Bytes of weights that are packed before they go to the device.
const UPLOAD_BYTES: usize = 4 << 20;

/// Kernels, buffers and bind groups of a model.
pub struct Resident {
    pub pipelines: Pipelines,
    pub body: Vec<Ready>,
    pub head: Vec<Ready>,
    pub step: wgpu::Buffer,
    pub told: wgpu::Buffer,
    pub logits: wgpu::Buffer,
}

/// A dispatch with its bind group.
pub struct Ready {
    pub kernel: Kernel,
    pub groups: Groups,
    pub bind_group: wgpu::BindGroup,
}

/// What products read.
pub fn products(compiled: &Compiled, sources: &[WeightSource<'_>]) -> Products {
    let matrices: BTreeSet<usize> = compiled
        .body
        .iter()
        .chain(&compiled.head)
        .filter(|dispatch| matches!(dispatch.kernel, Kernel::Product { .. }))
        .flat_map(|dispatch| &dispatch.bound)
        .filter_map(|bound| match bound {
            Bound::Values { matrix, .. } => Some(*matrix),
            _ => None,
        })
        .collect();
    let mut products = Products::default();
    for matrix in matrices.into_iter().map(|matrix| &compiled.matrices[matrix]) {
        let (blocks, tiles) = (matrix.cols / BLOCK, matrix.count.div_ceil(weights::TILE));
        let of_tile =
            weights::value_bytes(matrix.kind, blocks) + weights::scale_bytes(matrix.kind, blocks);
        products.bytes += (tiles * of_tile) as u64;
        let of_file = matrix.rows.weights.iter().map(|&weight| sources[weight].data.len() as u64);
        products.file_bytes += of_file.sum::<u64>();
    }
    products
}

/// All memory of a model, before it is bound.
pub struct Buffers {
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

/// Storage that the host writes.
pub const STORAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST);

impl Buffers {
    /// Allocates all of it.
    ///
    /// # Errors
    /// [`DeviceError`] naming what could not be allocated.
    pub fn new(
        gpu: &Gpu,
        config: &VulkanDeviceConfig,
        compiled: &Compiled,
        [tokens_max, taken_max]: [usize; 2],
        sources: &[WeightSource<'_>],
    ) -> Result<Self, DeviceError> {
        let align = u64::from(gpu.device.limits().min_storage_buffer_offset_alignment);
        let part = |matrix: &Matrix, tiles: usize| {
            let blocks = matrix.cols / BLOCK;
            let values = (tiles * weights::value_bytes(matrix.kind, blocks)) as u64;
            let scales_at = values.next_multiple_of(align);
            let scales = (tiles * weights::scale_bytes(matrix.kind, blocks)) as u64;
            Ok((gpu.buffer("weights", scales_at + scales, STORAGE)?, scales_at))
        };
        let matrix =
            |matrix: &Matrix| matrix.parts.iter().map(|&(_, tiles)| part(matrix, tiles)).collect();
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
            rope_angles(position, &config.rope.frequencies, row);
        }
        gpu.queue.write_buffer(&buffers.angles, 0, bytemuck::cast_slice(&angles));
        Ok(buffers)
    }

    /// Packs tile by tile, so that the host never holds more than a few megabytes of weights that
    /// are not the file's own pages.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] in the driver's words.
    pub fn upload(
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
                let values = vector_values(&sources[index])?;
                gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(&values));
                total += 4 * values.len() as u64;
                loaded(sources[index].data.len() as u64);
            }
        }
        let (mut values, mut scales) = (Vec::new(), Vec::new());
        let mut told = BTreeSet::new();
        for (matrix, parts) in compiled.matrices.iter().zip(&self.matrices) {
            let blocks = matrix.cols / BLOCK;
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

    /// Binds every dispatch to what it names.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] in the driver's words.
    pub fn bind(
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
