//! `cargo bench -p pawl-engine-core`: products of packed weights on one thread, for each set of
//! instructions of this machine, beside what the machine gives at most, measured just before: few
//! rows are bound by the memory, many by the multiplications.

#![allow(clippy::print_stdout, reason = "a bench is read on the terminal")]

use pawl_engine_core::device::DeviceError;
use pawl_engine_core::device::cpu::measure::{self, ProductFigure, ProductLimits};
use pawl_engine_core::device::cpu::{Isa, measure::Peak};

fn main() -> Result<(), DeviceError> {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let Some(limits) = measure::product_limits(isa)? else { continue };
        let ProductLimits { peak: Peak { bytes_per_s, floats_per_s }, read_bytes_per_s } = limits;
        println!(
            "{}, one thread at most: {:.1} GMAC/s of bytes, {:.1} of f32, {:.1} GB/s read\n\
             {:<5} {:>5} {:>9} {:>8} {:>8} {:>8}",
            isa.as_str(),
            bytes_per_s / 1e9,
            floats_per_s / 1e9,
            read_bytes_per_s / 1e9,
            "kind",
            "rows",
            "GMAC/s",
            "of peak",
            "GB/s",
            "of read",
        );
        for figure in measure::products(isa) {
            println!("{}", line(&figure, &limits));
        }
        println!();
    }
    Ok(())
}

fn line(figure: &ProductFigure, limits: &ProductLimits) -> String {
    let Peak { bytes_per_s, floats_per_s } = limits.peak;
    let peak = if figure.quantised { bytes_per_s } else { floats_per_s };
    format!(
        "{:<5} {:>5} {:>9.1} {:>6.0} % {:>8.1} {:>6.0} %",
        figure.kind,
        figure.rows,
        figure.macs_per_s / 1e9,
        100.0 * figure.macs_per_s / peak,
        figure.bytes_per_s / 1e9,
        100.0 * figure.bytes_per_s / limits.read_bytes_per_s,
    )
}
