//! Values that cannot work. Each finding names key, value and what would be right.

use super::RawConfig;
use crate::optim::lr::Schedule;
use crate::optim::{OptimizerConfig, StateKind};
use crate::trainer::{NonFinite, TrainConfig};
use crate::zero::{Precision, ZeroConfig};

/// Parameters of the largest model: more than any machine holds.
const MAX_PARAMS: u128 = 1 << 40;

/// Findings, all of them, so that one look at the message mends the file.
pub(super) struct Findings(pub Vec<String>);

impl Findings {
    /// Notes a setting that nothing reads, which is a mistake to tell about, not to pass over.
    fn no_effect(&mut self, key: &str, value: impl std::fmt::Debug, under: &str) {
        self.0.push(format!(
            "{key} = {value:?} has no effect under {under}: remove it"
        ));
    }

    /// Notes `key = value: must be …` unless `ok`.
    fn must(&mut self, ok: bool, key: &str, value: impl std::fmt::Debug, be: &str) {
        if !ok {
            self.0.push(format!("{key} = {value:?}: must be {be}"));
        }
    }
}

/// Everything wrong with the values of `raw`, on `num_ranks` ranks.
pub(super) fn findings(raw: &RawConfig, num_ranks: usize) -> Findings {
    let mut found = Findings(Vec::new());
    run(raw, &mut found);
    if let Err(error) = raw.data.validate() {
        found.0.push(match error {
            crate::Error::Config(message) => message,
            other => other.to_string(),
        });
    }
    model(raw, &mut found);
    optimizer(raw, &mut found);
    lr(raw, &mut found);
    train(raw, num_ranks, &mut found);
    zero(raw, &mut found);
    let timeout = raw.comm.timeout_s;
    let be = "from 1 to 31536000, a year";
    let ok = (1..=31_536_000).contains(&timeout);
    found.must(ok, "comm.timeout_s", timeout, be);
    let keep = raw.checkpoint.keep;
    found.must(
        keep >= 1,
        "checkpoint.keep",
        keep,
        "at least 1, or the run could not be resumed",
    );
    let every = raw.metrics.log_every;
    found.must(every >= 1, "metrics.log_every", every, "at least 1");
    if let Some(peak) = raw.hardware.peak_tflops {
        let ok = peak.is_finite() && peak > 0.0;
        found.must(ok, "hardware.peak_tflops", peak, "a finite number above 0");
    }
    found
}

fn run(raw: &RawConfig, found: &mut Findings) {
    let name = raw.run.name.as_str();
    let is_folder = !matches!(name, "" | "." | "..")
        && name.len() <= 255
        && !name.contains(|c: char| matches!(c, '/' | '\\') || c.is_control());
    let be =
        "the name of a folder: not empty, \".\" or \"..\", at most 255 bytes, without / and \\";
    found.must(is_folder, "run.name", name, be);
    let dir = &raw.run.dir;
    found.must(
        !dir.as_os_str().is_empty(),
        "run.dir",
        dir,
        "a folder, \".\" for the current one",
    );
}

fn model(raw: &RawConfig, found: &mut Findings) {
    let model = &raw.model;
    let positive = "at least 1";
    found.must(
        model.num_layers >= 1,
        "model.num_layers",
        model.num_layers,
        positive,
    );
    found.must(
        model.num_heads >= 1,
        "model.num_heads",
        model.num_heads,
        positive,
    );
    found.must(model.d_model >= 1, "model.d_model", model.d_model, positive);
    found.must(model.seq_len >= 1, "model.seq_len", model.seq_len, positive);
    if model.num_heads >= 1 && !model.d_model.is_multiple_of(model.num_heads) {
        found.0.push(format!(
            "model.num_heads = {} does not divide model.d_model = {}: every head needs the same \
             width",
            model.num_heads, model.d_model
        ));
    }
    if let Some(vocab) = model.vocab_size {
        let ok = vocab >= 1 && vocab <= u32::MAX as usize;
        found.must(
            ok,
            "model.vocab_size",
            vocab,
            "at least 1 and below 2^32 (tokens are u32)",
        );
    }
    // 12 D^2 weights a block; positions; at most two tables.
    let [l, d, s] = [model.num_layers, model.d_model, model.seq_len].map(|n| n as u128);
    let v = model.vocab_size.unwrap_or(0) as u128;
    let blocks = l.saturating_mul(12).saturating_mul(d).saturating_mul(d);
    let tables = d.saturating_mul(s + 2 * v);
    if blocks.saturating_add(tables) > MAX_PARAMS {
        let vocab = match model.vocab_size {
            Some(v) => format!(", model.vocab_size = {v}"),
            None => String::new(),
        };
        found.0.push(format!(
            "model.num_layers = {l}, model.d_model = {d}, model.seq_len = {s}{vocab}: more than \
             2^40 parameters; make the largest of them smaller"
        ));
    }
    let dropout = model.dropout;
    found.must(
        (0.0..1.0).contains(&dropout),
        "model.dropout",
        dropout,
        "at least 0 and below 1",
    );
}

fn optimizer(raw: &RawConfig, found: &mut Findings) {
    let optimizer = &raw.optimizer;
    let block = optimizer.block;
    let ok = block >= 64 && 2048usize.is_multiple_of(block);
    found.must(
        ok,
        "optimizer.block",
        block,
        "64, 128, 256, 512, 1024 or 2048",
    );
    // Smaller parameters lie in the plain region of a unit's buffer, which has no block grid.
    let min = optimizer.min_8bit_size;
    found.must(min >= 4096, "optimizer.min_8bit_size", min, "at least 4096");
    if optimizer.state == StateKind::F32 {
        let default = OptimizerConfig::default();
        for (key, value, default) in [
            ("optimizer.block", block, default.block),
            ("optimizer.min_8bit_size", min, default.min_8bit_size),
        ] {
            if value != default {
                found.no_effect(key, value, "optimizer.state = \"f32\"");
            }
        }
    }
    for (key, beta) in [
        ("optimizer.beta1", optimizer.beta1),
        ("optimizer.beta2", optimizer.beta2),
    ] {
        found.must(
            (0.0..1.0).contains(&beta),
            key,
            beta,
            "at least 0 and below 1",
        );
    }
    let eps = optimizer.eps;
    let ok = eps.is_finite() && eps > 0.0;
    found.must(ok, "optimizer.eps", eps, "a finite number above 0");
    let decay = optimizer.weight_decay;
    let ok = decay.is_finite() && decay >= 0.0;
    found.must(
        ok,
        "optimizer.weight_decay",
        decay,
        "a finite number, at least 0",
    );
}

fn lr(raw: &RawConfig, found: &mut Findings) {
    let (lr, steps) = (&raw.lr, raw.train.steps);
    for (key, rate) in [("lr.peak", lr.peak), ("lr.min", lr.min)] {
        let ok = rate.is_finite() && rate >= 0.0;
        found.must(ok, key, rate, "a finite number, at least 0");
    }
    let decays = lr.schedule != Schedule::Constant;
    if decays && lr.min > lr.peak {
        found.0.push(format!(
            "lr.min = {:?} is above lr.peak = {:?}: the rate falls from peak to min",
            lr.min, lr.peak
        ));
    }
    if !decays && let Some(end) = lr.decay_end {
        found.0.push(format!(
            "lr.decay_end = {end} has no effect under lr.schedule = \"constant\": remove it or \
             choose a schedule that decays"
        ));
    }
    if lr.schedule != Schedule::Wsd
        && let Some(decay) = lr.decay_steps
    {
        found.0.push(format!(
            "lr.decay_steps = {decay} has an effect under lr.schedule = \"wsd\" only: remove it"
        ));
    }
    let warmup = lr.warmup_steps;
    let (end, end_key) = match lr.decay_end {
        Some(end) if decays => (end, "lr.decay_end"),
        _ => (steps, "train.steps"),
    };
    let too_long = if decays { warmup >= end } else { warmup > end };
    if too_long {
        found.0.push(format!(
            "lr.warmup_steps = {warmup} leaves no step before {end_key} = {end}: the schedule ends \
             before it starts; make the warmup shorter"
        ));
    } else if lr.schedule == Schedule::Wsd {
        let decay = lr.decay_steps.unwrap_or(steps / 5);
        let room = end - warmup;
        if decay > room || lr.decay_steps == Some(0) {
            let default = if lr.decay_steps.is_none() {
                " (a fifth of the run)"
            } else {
                ""
            };
            found.0.push(format!(
                "lr.decay_steps = {decay}{default}: must be at least 1 and at most {room}, the \
                 steps from lr.warmup_steps = {warmup} to {end_key} = {end}"
            ));
        }
    }
}

fn zero(raw: &RawConfig, found: &mut Findings) {
    let (zero, default) = (&raw.zero, ZeroConfig::default());
    let stage = zero.stage;
    found.must(
        matches!(stage, 0 | 3),
        "zero.stage",
        stage,
        "0 (data parallel) or 3 (sharded)",
    );
    let qwz = &zero.qwz;
    let bits = qwz.bits;
    found.must(matches!(bits, 4 | 8), "zero.qwz.bits", bits, "4 or 8");
    let ok = qwz.block >= 64 && 2048usize.is_multiple_of(qwz.block);
    let be = "64, 128, 256, 512, 1024 or 2048";
    found.must(ok, "zero.qwz.block", qwz.block, be);
    if qwz.enabled && raw.precision.gather != Precision::F32 {
        let gather = raw.precision.gather;
        found.no_effect("precision.gather", gather, "zero.qwz.enabled = true");
    }
    if stage == 0 {
        if qwz.enabled {
            found.no_effect("zero.qwz.enabled", true, "zero.stage = 0");
        }
        let under = "zero.stage = 0";
        if zero.reshard_after_forward != default.reshard_after_forward {
            found.no_effect(
                "zero.reshard_after_forward",
                zero.reshard_after_forward,
                under,
            );
        }
        if zero.prefetch != default.prefetch {
            found.no_effect("zero.prefetch", zero.prefetch, under);
        }
        for (key, precision) in [
            ("precision.gather", raw.precision.gather),
            ("precision.reduce", raw.precision.reduce),
        ] {
            if precision != Precision::F32 {
                found.no_effect(key, precision, under);
            }
        }
    } else if !zero.overlap && zero.prefetch != default.prefetch {
        found.no_effect("zero.prefetch", zero.prefetch, "zero.overlap = false");
    }
}

fn train(raw: &RawConfig, num_ranks: usize, found: &mut Findings) {
    let train = &raw.train;
    found.must(train.steps >= 1, "train.steps", train.steps, "at least 1");
    let micro_batch = train.micro_batch;
    found.must(
        micro_batch >= 1,
        "train.micro_batch",
        micro_batch,
        "at least 1",
    );
    let at_once = micro_batch.saturating_mul(num_ranks);
    if let Some(global) = train.global_batch
        && (global == 0 || (at_once >= 1 && !global.is_multiple_of(at_once)))
    {
        found.0.push(format!(
            "train.global_batch = {global}: must be a multiple of train.micro_batch x ranks = \
             {micro_batch} x {num_ranks}"
        ));
    }
    let sequences = train.global_batch.unwrap_or(at_once);
    let tokens = sequences.checked_mul(raw.model.seq_len).map(|t| t as u64);
    if tokens.and_then(|t| t.checked_mul(train.steps)).is_none() {
        found.0.push(format!(
            "train.steps = {} of {sequences} sequences of model.seq_len = {} tokens: more tokens \
             than 2^64",
            train.steps, raw.model.seq_len
        ));
    }
    if let Some(threads) = train.threads {
        let be = "from 1 to 1024; leave it out for all cores";
        found.must((1..=1024).contains(&threads), "train.threads", threads, be);
    }
    let skips = train.max_skips;
    if train.non_finite == NonFinite::Abort && skips != TrainConfig::default().max_skips {
        found.no_effect("train.max_skips", skips, "train.non_finite = \"abort\"");
    }
    let clip = train.grad_clip;
    let ok = clip.is_finite() && clip >= 0.0;
    found.must(
        ok,
        "train.grad_clip",
        clip,
        "a finite number, at least 0 (0 for no limit)",
    );
}
