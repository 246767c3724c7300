//! The kernels: which shader, with which constants, over which buffers.

use std::collections::{BTreeMap, BTreeSet};

use super::weights::{number, vectors};
use super::{Gpu, Path};
use crate::device::cpu::packed::Kind;
use crate::device::{Activation, DeviceError};

/// What a product does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Epilogue {
    /// Stores them.
    Store,
    /// Adds them to what is there.
    Add,
    /// Even columns, activated, times odd ones.
    Silu,
    /// The same.
    Gelu,
}

impl From<Activation> for Epilogue {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::Silu,
            Activation::Gelu => Self::Gelu,
        }
    }
}

/// Rows of activations that a product's workgroup takes, by the rows there are: a row alone is
/// bound by reading weights, and many share what was read.
pub const PRODUCT_ROWS: [u32; 3] = [1, 4, 8];

/// A kernel with its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// `weights.wgsl`
    Product { kind: u32, vectors: u32, rows: u32, epilogue: Epilogue },
    /// `weights.wgsl`
    Embed { kind: u32, vectors: u32 },
    /// `norm.wgsl`
    Norm { taken: bool },
    /// `rope_kv.wgsl`
    RopeKv,
    /// `attention.wgsl`
    Attention { head_dim: u32 },
    /// `gate.wgsl`
    Gate { gelu: bool },
    /// `add_bias.wgsl`
    AddBias,
    /// `argmax.wgsl`
    Argmax,
}

impl Kernel {
    /// Products of a matrix of `kind`.
    pub fn product(kind: Kind, rows: u32, epilogue: Epilogue) -> Self {
        Self::Product { kind: number(kind), vectors: vectors(kind) as u32, rows, epilogue }
    }

    /// Rows of a table of `kind`.
    pub fn embed(kind: Kind) -> Self {
        Self::Embed { kind: number(kind), vectors: vectors(kind) as u32 }
    }
}

/// How a kernel sees a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Constants of one dispatch.
    Shape,
    /// Read only.
    Read,
    /// Read and written.
    Write,
}

/// A shader's text, and what it is asked for.
pub struct Source {
    /// Its file below `shaders/`.
    pub file: &'static str,
    /// The text.
    pub text: &'static str,
    /// Entry point.
    pub entry: &'static str,
    /// Override constants.
    pub constants: Vec<(&'static str, f64)>,
    /// By binding number.
    pub bindings: &'static [(u32, Access)],
}

macro_rules! shader {
    ($file:literal) => {
        ($file, include_str!(concat!("../../../../shaders/", $file)))
    };
}

/// All shaders, by their files.
pub const SHADERS: [(&str, &str); 8] = [
    shader!("weights.wgsl"),
    shader!("norm.wgsl"),
    shader!("rope_kv.wgsl"),
    shader!("attention.wgsl"),
    shader!("gate.wgsl"),
    shader!("add_bias.wgsl"),
    shader!("argmax.wgsl"),
    shader!("subgroup/weights.wgsl"),
];

impl Kernel {
    /// The shader that runs it on `path`.
    pub fn source(self, path: Path) -> Source {
        use Access::{Read, Shape, Write};
        let (shader, entry, constants, bindings): (usize, _, _, &'static [(u32, Access)]) =
            match self {
                Self::Product { kind, vectors, rows, epilogue } => {
                    let mut constants = vec![
                        ("KIND", f64::from(kind)),
                        ("VECTORS", f64::from(vectors)),
                        ("ROWS", f64::from(rows)),
                        ("EPILOGUE", f64::from(epilogue as u32)),
                    ];
                    if !path.subgroups {
                        constants.push(("SEGMENTS", f64::from(path.segments)));
                    }
                    (
                        if path.subgroups { 7 } else { 0 },
                        "product",
                        constants,
                        &[(0, Shape), (1, Read), (2, Read), (3, Read), (4, Read), (5, Write)],
                    )
                }
                Self::Embed { kind, vectors } => (
                    0,
                    "embed",
                    vec![("KIND", f64::from(kind)), ("VECTORS", f64::from(vectors))],
                    &[(0, Shape), (1, Read), (2, Read), (3, Read), (5, Write), (6, Read)],
                ),
                Self::Norm { taken } => (
                    1,
                    "norm",
                    vec![("TAKEN", f64::from(u8::from(taken)))],
                    &[(0, Shape), (1, Read), (2, Read), (3, Read), (4, Write)],
                ),
                Self::RopeKv => (
                    2,
                    "rope_kv",
                    Vec::new(),
                    &[(0, Shape), (1, Read), (2, Read), (3, Write), (4, Write), (5, Write)],
                ),
                Self::Attention { head_dim } => (
                    3,
                    "attention",
                    vec![("HEAD_DIM", f64::from(head_dim))],
                    &[(0, Shape), (1, Read), (2, Read), (3, Read), (4, Read), (5, Write)],
                ),
                Self::Gate { gelu } => (
                    4,
                    "gate",
                    vec![("ACTIVATION", f64::from(u8::from(gelu)))],
                    &[(0, Shape), (1, Write)],
                ),
                Self::AddBias => (5, "add_bias", Vec::new(), &[(0, Shape), (1, Read), (2, Write)]),
                Self::Argmax => (
                    6,
                    "argmax",
                    Vec::new(),
                    &[(0, Shape), (1, Read), (2, Read), (3, Write), (4, Write)],
                ),
            };
        let (file, text) = SHADERS[shader];
        Source { file, text, entry, constants, bindings }
    }
}

/// The compiled kernels of a device.
pub struct Pipelines {
    path: Path,
    layouts: BTreeMap<&'static [(u32, Access)], wgpu::BindGroupLayout>,
    compiled: BTreeMap<Kernel, wgpu::ComputePipeline>,
}

impl Pipelines {
    /// Compiles `kernels`, on all processors at once.
    ///
    /// # Errors
    /// [`DeviceError::Vulkan`] naming the shader that does not compile, and why.
    pub fn compile(gpu: &Gpu, kernels: &BTreeSet<Kernel>, path: Path) -> Result<Self, DeviceError> {
        let mut layouts = BTreeMap::new();
        for kernel in kernels {
            let bindings = kernel.source(path).bindings;
            layouts.entry(bindings).or_insert_with(|| layout(&gpu.device, bindings));
        }
        let kernels: Vec<_> = kernels.iter().copied().collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = kernels.len().div_ceil(threads).max(1);
        let compiled = std::thread::scope(|scope| {
            let layouts = &layouts;
            let compile = |kernels: &[Kernel]| -> Result<Vec<_>, DeviceError> {
                let each = |&kernel: &Kernel| {
                    let source = kernel.source(path);
                    let layout = &layouts[source.bindings];
                    Ok((kernel, gpu.pipeline(&source, layout)?))
                };
                kernels.iter().map(each).collect()
            };
            let work: Vec<_> =
                kernels.chunks(share).map(|some| scope.spawn(move || compile(some))).collect();
            let results = work.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(DeviceError::Vulkan("a shader's compiler panicked".to_owned()))
                })
            });
            results.collect::<Result<Vec<_>, _>>()
        })?;
        Ok(Self { path, layouts, compiled: compiled.into_iter().flatten().collect() })
    }

    /// How they run.
    pub fn path(&self) -> Path {
        self.path
    }

    /// A compiled kernel.
    pub fn get(&self, kernel: Kernel) -> &wgpu::ComputePipeline {
        &self.compiled[&kernel]
    }

    /// What its bind groups look like.
    pub fn layout(&self, kernel: Kernel) -> &wgpu::BindGroupLayout {
        &self.layouts[kernel.source(self.path).bindings]
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.compiled.len()
    }
}

fn layout(device: &wgpu::Device, bindings: &[(u32, Access)]) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = bindings
        .iter()
        .map(|&(binding, access)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: match access {
                    Access::Shape => wgpu::BufferBindingType::Uniform,
                    Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                    Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
                },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries };
    device.create_bind_group_layout(&descriptor)
}
