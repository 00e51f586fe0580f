//! What every collective moved, and how much of its time the computation did not see.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::LinkBytes;

/// Why bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Weights for the forward pass.
    ForwardGather,
    /// Weights for the backward pass.
    BackwardGather,
    /// Gradients to their owners, or under stage 0 to everybody.
    GradientReduce,
    /// Loss, gradient norm and decisions that all ranks take alike.
    Scalars,
    /// Weights for evaluation.
    Evaluation,
    /// Weights and state on their way into a checkpoint.
    Checkpoint,
    /// Hashes by which ranks see that they agree, and the weights they are of.
    Agreement,
}

impl Purpose {
    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::ForwardGather => "forward_gather",
            Purpose::BackwardGather => "backward_gather",
            Purpose::GradientReduce => "gradient_reduce",
            Purpose::Scalars => "scalars",
            Purpose::Evaluation => "evaluation",
            Purpose::Checkpoint => "checkpoint",
            Purpose::Agreement => "agreement",
        }
    }
}

/// What a collective is booked under.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Booking {
    /// Why bytes move.
    pub purpose: Purpose,
    /// Name of the unit whose data it is; empty when it is nobody's.
    pub unit: String,
    /// Collective and path: `all_gather`, `reduce_scatter`, `two_hop`.
    pub algorithm: &'static str,
    /// Name of the codec.
    pub codec: String,
}

impl Booking {
    /// The booking of small data that belongs to no unit.
    pub fn small(purpose: Purpose, algorithm: &'static str) -> Self {
        Self {
            purpose,
            unit: String::new(),
            algorithm,
            codec: "none".into(),
        }
    }
}

/// Sums over collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Collectives.
    pub calls: u64,
    /// Elements of whole units, padding included.
    pub elements: u64,
    /// Received by this rank, framing included.
    pub moved: LinkBytes,
    /// Time on the communication thread.
    pub busy: Duration,
    /// Time the computation waited for it, also while those before it ran.
    pub exposed: Duration,
}

impl Totals {
    fn add(&mut self, other: &Totals) {
        self.calls += other.calls;
        self.elements += other.elements;
        self.moved += other.moved;
        self.busy += other.busy;
        self.exposed += other.exposed;
    }
}

/// The books of a rank.
#[derive(Debug, Default)]
pub struct Ledger {
    step: BTreeMap<Booking, Totals>,
    run: BTreeMap<Booking, Totals>,
}

impl Ledger {
    /// Books one collective.
    pub fn book(&mut self, booking: Booking, totals: Totals) {
        self.step.entry(booking.clone()).or_default().add(&totals);
        self.run.entry(booking).or_default().add(&totals);
    }

    /// What was booked since the last call.
    pub fn take_step(&mut self) -> Traffic {
        Traffic::of(std::mem::take(&mut self.step))
    }

    /// Everything booked.
    pub fn run(&self) -> &BTreeMap<Booking, Totals> {
        &self.run
    }

    /// A table of the run by purpose, algorithm and codec; `seconds` is the time it took. Empty
    /// when nothing moved.
    pub fn table(&self, seconds: f64) -> String {
        let mut rows: BTreeMap<(Purpose, &str, &str), Totals> = BTreeMap::new();
        for (booking, totals) in &self.run {
            let key = (booking.purpose, booking.algorithm, booking.codec.as_str());
            rows.entry(key).or_default().add(totals);
        }
        if rows.values().all(|t| t.moved == LinkBytes::default()) {
            return String::new();
        }
        let mut table = format!(
            "{:16} {:15} {:8} {:>8} {:>12} {:>12} {:>9} {:>9} {:>7}\n",
            "purpose",
            "algorithm",
            "codec",
            "calls",
            "intra MiB",
            "inter MiB",
            "busy s",
            "exposed s",
            "share"
        );
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let mut all = Totals::default();
        for ((purpose, algorithm, codec), t) in rows {
            all.add(&t);
            table += &format!(
                "{:16} {:15} {:8} {:8} {:12.2} {:12.2} {:9.2} {:9.2} {:6.1}%\n",
                purpose.name(),
                algorithm,
                codec,
                t.calls,
                mib(t.moved.intra_bytes),
                mib(t.moved.inter_bytes),
                t.busy.as_secs_f64(),
                t.exposed.as_secs_f64(),
                100.0 * t.exposed.as_secs_f64() / seconds.max(1e-9),
            );
        }
        let (busy, exposed) = (all.busy.as_secs_f64(), all.exposed.as_secs_f64());
        let hidden = 100.0 * (1.0 - exposed / busy.max(1e-9)).max(0.0);
        table +=
            &format!("{hidden:.0}% of {busy:.2} s of communication hidden behind computation\n");
        table
    }
}

/// What a step moved, for the log.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// Received between ranks of a node.
    pub intra_bytes: u64,
    /// Received between nodes.
    pub inter_bytes: u64,
    /// Time of collectives.
    pub busy_ms: f64,
    /// Time the computation waited for them; the rest was hidden behind it.
    pub exposed_ms: f64,
    /// The same by purpose.
    pub by_purpose: BTreeMap<&'static str, PurposeTraffic>,
}

/// What a step moved for one purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PurposeTraffic {
    /// Received between ranks of a node.
    pub intra_bytes: u64,
    /// Received between nodes.
    pub inter_bytes: u64,
    /// Time of collectives.
    pub busy_ms: f64,
    /// Time the computation waited for them, also while those of other purposes ran before them.
    pub exposed_ms: f64,
}

impl Traffic {
    fn of(step: BTreeMap<Booking, Totals>) -> Self {
        let mut traffic = Self::default();
        for (booking, totals) in step {
            let (busy_ms, exposed_ms) = (
                totals.busy.as_secs_f64() * 1e3,
                totals.exposed.as_secs_f64() * 1e3,
            );
            let LinkBytes {
                intra_bytes,
                inter_bytes,
            } = totals.moved;
            traffic.intra_bytes += intra_bytes;
            traffic.inter_bytes += inter_bytes;
            traffic.busy_ms += busy_ms;
            traffic.exposed_ms += exposed_ms;
            let purpose = traffic
                .by_purpose
                .entry(booking.purpose.name())
                .or_default();
            purpose.intra_bytes += intra_bytes;
            purpose.inter_bytes += inter_bytes;
            purpose.busy_ms += busy_ms;
            purpose.exposed_ms += exposed_ms;
        }
        traffic
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_the_run_add_up() {
        let booking = |purpose, unit: &str| Booking {
            unit: unit.into(),
            codec: "f32".into(),
            ..Booking::small(purpose, "all_gather")
        };
        let totals = |inter_bytes| Totals {
            calls: 1,
            elements: 10,
            moved: LinkBytes {
                intra_bytes: 1,
                inter_bytes,
            },
            busy: Duration::from_millis(5),
            exposed: Duration::from_millis(2),
        };
        let mut ledger = Ledger::default();
        for step in 0..2 {
            ledger.book(booking(Purpose::ForwardGather, "block 0"), totals(7));
            ledger.book(booking(Purpose::ForwardGather, "block 1"), totals(8));
            ledger.book(booking(Purpose::Scalars, ""), totals(step));
            let traffic = ledger.take_step();
            assert_eq!(
                (traffic.intra_bytes, traffic.inter_bytes),
                (3, 15 + step),
                "step {step}"
            );
            assert_eq!(traffic.by_purpose["forward_gather"].inter_bytes, 15);
            assert_eq!(traffic.by_purpose["scalars"].busy_ms, 5.0);
        }
        assert_eq!(
            ledger.run()[&booking(Purpose::ForwardGather, "block 0")].calls,
            2
        );
        let table = ledger.table(1.0);
        assert_eq!(table.lines().count(), 4, "{table}");
        assert!(table.contains("60% of 0.03 s"), "{table}");
        assert!(table.contains("forward_gather"), "{table}");
        assert_eq!(Ledger::default().table(1.0), "");
    }
}
