//! `cargo bench -p pawl-engine-core`: products of packed weights on one thread, for each
//! instruction set of this machine. Put the machine's memory bandwidth beside the figures of one
//! row, and its peak of byte dot products beside those of many.

#![allow(clippy::print_stdout, reason = "a bench is read on the terminal")]

use pawl_engine_core::device::cpu::{Isa, measure};

fn main() {
    println!("{:<8} {:<5} {:>5} {:>12} {:>10}", "isa", "kind", "rows", "GMAC/s", "GB/s");
    for isa in Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar && isa.available()) {
        for figure in measure::products(isa) {
            println!(
                "{:<8} {:<5} {:>5} {:>12.1} {:>10.1}",
                isa.as_str(),
                figure.kind,
                figure.rows,
                figure.macs_per_s / 1e9,
                figure.bytes_per_s / 1e9
            );
        }
    }
}
