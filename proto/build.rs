//! Compiles the interface without `protoc`: protox reads the files, prost and tonic write the code.

use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["inference.proto", "control.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let compiled = protox::compile(files, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), compiled.encode_to_vec())?;
    // Connecting is the caller's: generated clients work over any HTTP/2 client.
    tonic_prost_build::configure().build_transport(false).compile_fds(compiled)?;
    Ok(())
}
