//! The `process_*` families. The crate's own collector reads `/proc`, but its processor time is cut
//! to whole seconds, which hides the rate of an idle process; that one is asked of the kernel.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use prometheus::Counter;
use prometheus::core::{Collector, Desc};
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::MetricFamily;

use super::table;

pub(super) struct Process {
    rest: ProcessCollector,
}

impl Process {
    pub fn new() -> Self {
        Self { rest: ProcessCollector::for_self() }
    }

    fn processor_time() -> Counter {
        let spec = &table::PROCESS_CPU;
        let counter = Counter::new(spec.name, spec.help).expect("the table's names are valid");
        let usage = getrusage(UsageWho::RUSAGE_SELF).expect("the kernel always knows this");
        let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
        counter.inc_by(micros as f64 / 1e6);
        counter
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        // Names must be unique over all collectors; the crate's own names are ours.
        self.rest.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.rest.collect();
        families.retain(|family| family.name() != table::PROCESS_CPU.name);
        families.extend(Self::processor_time().collect());
        families
    }
}
