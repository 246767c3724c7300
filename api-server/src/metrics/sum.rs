//! One page for all frontends that share a port: whichever answers a scrape shows the same sum.
//!
//! The supervisor keeps it. It outlives every frontend, so what a dead one had counted stays in,
//! and no counter ever falls while frontends come and go. What a frontend counted between its last
//! report and a violent death is lost, as it is for any scraper.

use std::collections::BTreeMap;

use super::snapshot::{Exact, Family, Labels, Reading, Snapshot};
use super::table::{self, Across, MetricSpec, TABLE};

/// What every frontend stands at, those that are gone included.
#[derive(Debug, Default)]
pub struct FleetSum {
    slots: Vec<Slot>,
}

/// One place in the fleet, taken by one process after another.
#[derive(Debug, Default)]
struct Slot {
    /// What the place's former processes had counted. It belongs to the place and not to the
    /// fleet, so that numbers are always added in the same order, and no sum changes when a
    /// number moves from a living process to here.
    retired: Snapshot,
    /// The last report of each process that lives: one, or for a moment two.
    living: BTreeMap<u64, Snapshot>,
}

impl FleetSum {
    /// A fleet of so many places, nobody in them.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| Slot::default()).collect() }
    }

    /// Process `life` at place `slot` stands at `snapshot`.
    pub fn report(&mut self, slot: usize, life: u64, snapshot: Snapshot) {
        self.slots[slot].living.insert(life, snapshot);
    }

    /// Process `life` at place `slot` is gone. What it had counted stays.
    pub fn retire(&mut self, slot: usize, life: u64) {
        let slot = &mut self.slots[slot];
        if let Some(snapshot) = slot.living.remove(&life) {
            for spec in TABLE.iter().filter(|spec| spec.kind.accumulates()) {
                if let Some(family) = snapshot.0.get(spec.name) {
                    add(slot.retired.0.entry(spec.name.into()).or_default(), family);
                }
            }
        }
    }

    /// What the fleet stands at.
    #[must_use]
    pub fn sum(&self) -> Snapshot {
        let freshest = self.freshest();
        let mut sum = Snapshot::default();
        for spec in TABLE {
            let family = match spec.across {
                Across::Freshest => freshest.and_then(|s| s.0.get(spec.name)).cloned(),
                Across::Sum => self.add_up(spec),
                Across::Least => self.pick(spec, |new, old| new < old),
                Across::Greatest => self.pick(spec, |new, old| new > old),
            };
            sum.0.extend(family.map(|family| (spec.name.to_string(), family)));
        }
        sum
    }

    fn living(&self) -> impl Iterator<Item = &Snapshot> {
        self.slots.iter().flat_map(|slot| slot.living.values())
    }

    /// Who heard of the core last knows best how it does.
    fn freshest(&self) -> Option<&Snapshot> {
        let age = |snapshot: &Snapshot| {
            let readings = snapshot.0.get(table::STATS_AGE.name)?.0.values();
            readings.filter_map(Reading::number).min_by(f64::total_cmp)
        };
        let age = |snapshot| age(snapshot).unwrap_or(f64::INFINITY);
        self.living().min_by(|a, b| age(a).total_cmp(&age(b)))
    }

    fn add_up(&self, spec: &MetricSpec) -> Option<Family> {
        let mut total = None;
        for slot in &self.slots {
            let mut of_slot = slot.retired.0.get(spec.name).cloned();
            for snapshot in slot.living.values() {
                if let Some(family) = snapshot.0.get(spec.name) {
                    add(of_slot.get_or_insert_default(), family);
                }
            }
            if let Some(of_slot) = of_slot {
                add(total.get_or_insert_default(), &of_slot);
            }
        }
        total
    }

    fn pick(&self, spec: &MetricSpec, better: fn(f64, f64) -> bool) -> Option<Family> {
        let mut picked: Option<Family> = None;
        for family in self.living().filter_map(|snapshot| snapshot.0.get(spec.name)) {
            let into = picked.get_or_insert_default();
            for (labels, reading) in &family.0 {
                let old = into.0.get(labels).and_then(Reading::number);
                let new = reading.number();
                if old.is_none_or(|old| new.is_some_and(|new| better(new, old))) {
                    into.0.insert(labels.clone(), reading.clone());
                }
            }
        }
        picked
    }
}

fn add(to: &mut Family, family: &Family) {
    for (labels, reading) in &family.0 {
        add_series(to, labels, reading);
    }
}

fn add_series(to: &mut Family, labels: &Labels, reading: &Reading) {
    match to.0.get_mut(labels) {
        Some(into) => into.add(reading),
        None => {
            to.0.insert(labels.clone(), reading.clone());
        }
    }
}

impl Reading {
    fn number(&self) -> Option<f64> {
        match self {
            Self::Number(Exact(number)) => Some(*number),
            Self::Summary { .. } | Self::Histogram { .. } => None,
        }
    }

    /// Two series of one name and labels are of one kind: they come from the same table.
    fn add(&mut self, other: &Self) {
        match (self, other) {
            (Self::Number(into), Self::Number(number)) => into.0 += number.0,
            (Self::Summary { count, sum }, Self::Summary { count: more, sum: by }) => {
                *count += more;
                sum.0 += by.0;
            }
            (
                Self::Histogram { count, sum, buckets },
                Self::Histogram { count: more, sum: by, buckets: others },
            ) => {
                *count += more;
                sum.0 += by.0;
                *buckets = add_buckets(buckets, others);
            }
            (into, other) => debug_assert!(false, "{other:?} is added to {into:?}"),
        }
    }
}

/// Bounds differ where a core came back with another context length; a bound that one of the two
/// does not have stands at its next lower one there.
fn add_buckets(a: &[(Exact, u64)], b: &[(Exact, u64)]) -> Vec<(Exact, u64)> {
    let at = |buckets: &[(Exact, u64)], bound: Exact| {
        let below = buckets.partition_point(|(upper, _)| *upper <= bound);
        below.checked_sub(1).map_or(0, |last| buckets[last].1)
    };
    let mut bounds: Vec<Exact> = a.iter().chain(b).map(|(bound, _)| *bound).collect();
    bounds.sort_by(|x, y| x.0.total_cmp(&y.0));
    bounds.dedup();
    bounds.into_iter().map(|bound| (bound, at(a, bound) + at(b, bound))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn one(name: &str, reading: Reading) -> (String, Family) {
        (name.into(), Family([(Vec::new(), reading)].into()))
    }

    /// A frontend that counted `counted` twice over, and heard of the core `age` seconds ago.
    fn snapshot(counted: f64, running: f64, age: f64) -> Snapshot {
        let number = |number| Reading::Number(Exact(number));
        let histogram = Reading::Histogram {
            count: counted as u64,
            sum: Exact(counted),
            buckets: vec![(Exact(1.0), counted as u64 / 2), (Exact(5.0), counted as u64)],
        };
        Snapshot(BTreeMap::from([
            one("vllm:generation_tokens_total", number(counted)),
            one("vllm:time_to_first_token_seconds", histogram),
            one("vllm:num_requests_running", number(running)),
            one("pawl:stats_age_seconds", number(age)),
            one("pawl:requests_in_flight", number(running)),
            one("process_start_time_seconds", number(age)),
        ]))
    }

    fn number(snapshot: &Snapshot, name: &str) -> f64 {
        snapshot.0[name].0[&Vec::new()].number().unwrap()
    }

    fn histogram(snapshot: &Snapshot) -> (u64, f64, Vec<u64>) {
        match &snapshot.0["vllm:time_to_first_token_seconds"].0[&Vec::new()] {
            Reading::Histogram { count, sum, buckets } => {
                (*count, sum.0, buckets.iter().map(|(_, count)| *count).collect())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn counters_add_up_and_gauges_are_shown_once() {
        let mut fleet = FleetSum::new(2);
        fleet.report(0, 1, snapshot(3.0, 7.0, 0.5));
        fleet.report(1, 1, snapshot(4.0, 8.0, 0.25));
        let sum = fleet.sum();
        assert_eq!(number(&sum, "vllm:generation_tokens_total"), 7.0);
        assert_eq!(histogram(&sum), (7, 7.0, vec![3, 7]));
        assert_eq!(number(&sum, "vllm:num_requests_running"), 8.0, "not the freshest");
        assert_eq!(number(&sum, "pawl:requests_in_flight"), 15.0);
        assert_eq!(number(&sum, "process_start_time_seconds"), 0.25);

        fleet.retire(1, 1);
        let sum = fleet.sum();
        assert_eq!(number(&sum, "vllm:generation_tokens_total"), 7.0);
        assert_eq!(number(&sum, "vllm:num_requests_running"), 7.0, "of one that is gone");
        assert_eq!(number(&sum, "pawl:requests_in_flight"), 7.0);
    }

    #[test]
    fn histograms_of_different_bounds_add_up() {
        let buckets = |bounds: &[(f64, u64)]| -> Vec<(Exact, u64)> {
            bounds.iter().map(|(bound, count)| (Exact(*bound), *count)).collect()
        };
        assert_eq!(
            add_buckets(&buckets(&[(1.0, 1), (5.0, 4)]), &buckets(&[(2.0, 10), (5.0, 20)])),
            buckets(&[(1.0, 1), (2.0, 11), (5.0, 24)]),
        );
    }

    #[test]
    fn a_snapshot_survives_its_encoding_to_the_last_bit() {
        let sent = snapshot(0.1 + 0.2, f64::NAN, f64::INFINITY);
        let came = Snapshot::decode(&sent.encode()).unwrap();
        assert_eq!(number(&came, "vllm:generation_tokens_total"), 0.1 + 0.2);
        assert!(number(&came, "vllm:num_requests_running").is_nan());
        assert_eq!(number(&came, "pawl:stats_age_seconds"), f64::INFINITY);
        assert!(Snapshot::decode(b"{\"a\": 1}").is_err());
    }

    proptest! {
        /// Whatever frontends count, report and die of, no number on the page falls.
        #[test]
        fn nothing_ever_falls(events in prop::collection::vec((0..3usize, 0..4u8, 0.0..1.0f64), 99))
        {
            let mut fleet = FleetSum::new(3);
            let mut lives = [(1, 0.0); 3];
            let mut last = (0.0, (0, 0.0, vec![0, 0]));
            for (slot, event, by) in events {
                let (life, counted) = &mut lives[slot];
                match event {
                    0 => {
                        fleet.retire(slot, *life);
                        (*life, *counted) = (*life + 1, 0.0);
                    }
                    // The next process may report before the last word of the former one is in.
                    1 => fleet.report(slot, *life + 1, snapshot(0.0, 0.0, by)),
                    _ => {
                        *counted += by;
                        fleet.report(slot, *life, snapshot(*counted, 0.0, by));
                    }
                }
                let sum = fleet.sum();
                if !sum.0.contains_key("vllm:generation_tokens_total") {
                    continue;
                }
                let now = (number(&sum, "vllm:generation_tokens_total"), histogram(&sum));
                prop_assert!(now.0 >= last.0, "{now:?} after {last:?}");
                prop_assert!(now.1.0 >= last.1.0 && now.1.1 >= last.1.1);
                prop_assert!(now.1.2.iter().zip(&last.1.2).all(|(now, last)| now >= last));
                last = now;
            }
        }
    }
}
