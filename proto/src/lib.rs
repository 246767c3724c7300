//! Pawl's gRPC interface as Rust types, made from `inference.proto` and `control.proto`: messages,
//! servers to implement, and clients over any HTTP/2 client.

// What the comments say is in the interface's own files.
#![allow(missing_docs, clippy::all)]

tonic::include_proto!("pawl");

/// The compiled interface (a `google.protobuf.FileDescriptorSet`), for reflection.
pub const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("descriptors");
