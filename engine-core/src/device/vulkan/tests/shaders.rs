//! The shaders themselves: no device is needed.

use std::fmt::Write as _;

use wgpu::naga::front::wgsl;
use wgpu::naga::valid::{Capabilities, ValidationFlags, Validator};
use wgpu::naga::{AddressSpace, Module, StorageAccess, TypeInner};

use super::super::kernels::{Access, Kernel, SHADERS};
use super::*;
use crate::device::Activation;
use crate::device::cpu::packed::Kind;

fn parsed(file: &str, text: &str) -> Module {
    wgsl::parse_str(text).unwrap_or_else(|error| {
        panic!("{}", error.emit_to_string_with_path(text, file));
    })
}

fn access(space: AddressSpace) -> Option<Access> {
    match space {
        AddressSpace::Uniform => Some(Access::Shape),
        AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => {
            Some(Access::Write)
        }
        AddressSpace::Storage { .. } => Some(Access::Read),
        _ => None,
    }
}

/// What every adapter gives that the kernels run on; subgroups are asked for first.
fn validator() -> Validator {
    let capabilities = Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    Validator::new(ValidationFlags::all(), capabilities)
}

/// Every binding of every entry point that uses it, as the shaders declare them.
#[test]
fn the_shaders_are_valid_and_these_are_their_bindings() {
    let mut told = String::new();
    for (file, text) in SHADERS {
        let module = parsed(file, text);
        let mut validator = validator();
        let info = validator
            .validate(&module)
            .unwrap_or_else(|error| panic!("{}", error.emit_to_string_with_path(text, file)));
        for (index, entry) in module.entry_points.iter().enumerate() {
            writeln!(told, "{file}: {} {:?}", entry.name, entry.workgroup_size).unwrap();
            for (handle, global) in module.global_variables.iter() {
                let (Some(binding), Some(access)) = (global.binding, access(global.space)) else {
                    continue;
                };
                if info.get_entry_point(index)[handle].is_empty() {
                    continue;
                }
                let ty = match &module.types[global.ty].inner {
                    TypeInner::Array { base, .. } => {
                        format!("array of {:?}", module.types[*base].inner)
                    }
                    TypeInner::Struct { span, .. } => format!("struct of {span} bytes"),
                    other => format!("{other:?}"),
                };
                let name = global.name.as_deref().unwrap_or("");
                writeln!(told, "  {} {access:?} {name}: {ty}", binding.binding).unwrap();
            }
        }
    }
    insta::assert_snapshot!(told);
}

fn kernels() -> Vec<Kernel> {
    let mut kernels = vec![
        Kernel::Norm { taken: false },
        Kernel::Norm { taken: true },
        Kernel::RopeKv,
        Kernel::Attention { head_dim: 64 },
        Kernel::Gate { gelu: true },
        Kernel::AddBias,
        Kernel::Argmax,
    ];
    for kind in [Kind::Q4, Kind::Q8, Kind::Q6, Kind::F16, Kind::BF16, Kind::F32] {
        kernels.push(Kernel::product(kind, 4, Activation::Silu.into()));
        kernels.push(Kernel::embed(kind));
    }
    kernels
}

/// What a kernel is bound to is what its entry point uses: no more and no less.
#[test]
fn kernels_bind_what_their_shaders_use() {
    let base = Path { segments: 8, subgroups: false, tokens_max: 64 };
    let twins = Path { segments: 1, subgroups: true, ..base };
    let all = kernels().into_iter().flat_map(|kernel| [(kernel, base), (kernel, twins)]);
    for (kernel, path) in all {
        let source = kernel.source(path);
        let module = parsed(source.file, source.text);
        let mut validator = validator();
        let info = validator.validate(&module).unwrap();
        let index = module.entry_points.iter().position(|e| e.name == source.entry).unwrap();
        let mut used: Vec<_> = module
            .global_variables
            .iter()
            .filter(|(handle, _)| !info.get_entry_point(index)[*handle].is_empty())
            .filter_map(|(_, global)| Some((global.binding?.binding, access(global.space)?)))
            .collect();
        used.sort_unstable();
        assert_eq!(used, source.bindings, "{kernel:?}");
        for (name, _) in &source.constants {
            let known = module.overrides.iter().any(|(_, o)| o.name.as_deref() == Some(name));
            assert!(known, "{kernel:?} sets {name}");
        }
    }
}
