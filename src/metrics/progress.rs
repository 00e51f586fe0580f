//! Steps on stderr: a bar on a terminal, one line a step elsewhere.

use std::io::Write;
use std::sync::OnceLock;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::record::TrainRecord;

/// All bars of the process. Add bars here, and they and the log lines leave each other whole.
/// Nothing is drawn when stderr is not a terminal.
pub fn bars() -> &'static MultiProgress {
    static BARS: OnceLock<MultiProgress> = OnceLock::new();
    BARS.get_or_init(MultiProgress::new)
}

/// Writes to stderr, above the bars. A closed stderr is no reason to stop training.
pub fn write_above_bars(text: &[u8]) {
    bars().suspend(|| {
        let mut stderr = std::io::stderr().lock();
        let _ = stderr.write_all(text);
        let _ = stderr.flush();
    });
}

/// Shows the steps of a run.
pub struct Progress {
    output: Output,
    num_steps: u64,
}

enum Output {
    Bar(ProgressBar),
    Lines,
}

impl Progress {
    /// Shows `num_steps` steps, of which `done` are behind: a bar when stderr is a terminal, lines
    /// otherwise.
    pub fn new(num_steps: u64, done: u64) -> Self {
        let output = if bars().is_hidden() {
            Output::Lines
        } else {
            let bar = bars().add(ProgressBar::new(num_steps));
            // The template is constant and valid; the plain bar is a harmless fallback.
            if let Ok(style) = ProgressStyle::with_template(
                "{bar:24} {pos}/{len} [{elapsed_precise} < {eta_precise}] {msg}",
            ) {
                bar.set_style(style);
            }
            bar.set_position(done);
            // Steps of an earlier process say nothing about this one's speed.
            bar.reset_eta();
            Output::Bar(bar)
        };
        Self { output, num_steps }
    }

    /// Shows a finished step.
    pub fn step(&self, record: &TrainRecord) {
        match &self.output {
            Output::Bar(bar) => {
                bar.set_position(record.step + 1);
                bar.set_message(numbers(record));
            }
            Output::Lines => write_above_bars(line(record, self.num_steps).as_bytes()),
        }
    }

    /// Leaves the bar as it stands.
    pub fn finish(&self) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
    }
}

fn line(record: &TrainRecord, num_steps: u64) -> String {
    let width = num_steps.to_string().len();
    format!(
        "step {:>width$}/{num_steps} | {}\n",
        record.step + 1,
        numbers(record)
    )
}

fn numbers(r: &TrainRecord) -> String {
    format!(
        "loss {:.4} | lr {:.2e} | norm {:.3} | {:.1} ms | {:.0} tok/s | {:.3} TFLOPs",
        r.loss, r.lr, r.grad_norm, r.step_ms, r.tokens_per_s, r.tflops
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Traffic;
    use crate::metrics::record::MemoryRecord;

    #[test]
    fn a_line_has_every_number() {
        let record = TrainRecord {
            step: 8,
            tokens: 4608,
            loss: 4.25,
            lr: 1e-3,
            grad_norm: 0.5,
            step_ms: 85.25,
            tokens_per_s: 9012.4,
            tflops: 0.1134,
            mfu: None,
            flops_formula: "megatron",
            comm: Traffic::default(),
            memory: MemoryRecord::default(),
        };
        assert_eq!(
            line(&record, 2000),
            "step    9/2000 | loss 4.2500 | lr 1.00e-3 | norm 0.500 | 85.2 ms | 9012 tok/s | \
             0.113 TFLOPs\n"
        );
    }
}
