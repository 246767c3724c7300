//! What goes wrong is an error that names it.

use super::super::buffers::STORAGE;
use super::super::kernels::{Access, Source};
use super::*;

#[test]
fn a_shader_that_does_not_compile_is_named() {
    let Some(gpu) = gpu() else { return };
    let source = Source {
        file: "broken.wgsl",
        text: "@compute @workgroup_size(1) fn broken() { nothing(); }",
        entry: "broken",
        constants: Vec::new(),
        bindings: &[(0, Access::Shape)],
    };
    let layout = gpu
        .device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &[] });
    let error = gpu.pipeline(&source, &layout).unwrap_err().to_string();
    assert!(error.contains("the shader broken.wgsl does not compile"), "{error}");
    assert!(error.contains("nothing"), "{error}");
    gpu.failure.check().unwrap();
}

#[test]
fn an_allocation_that_fails_is_named_with_its_size() {
    let Some(mut gpu) = gpu() else { return };
    let beyond = gpu.offer.buffer_bytes + 1;
    let error = gpu.buffer("the KV cache", beyond, STORAGE).unwrap_err().to_string();
    assert!(error.contains("the buffer of the KV cache"), "{error}");
    // What the limits allow and the device refuses.
    gpu.offer.buffer_bytes = u64::MAX;
    let error = gpu.buffer("the KV cache", beyond, STORAGE).unwrap_err().to_string();
    assert!(error.contains("bytes for the KV cache"), "{error}");
}
