//! Values that cannot work are refused; those that can survive the run folder's config.toml.

use proptest::prelude::*;
use train::Error;
use train::config::{Plan, RawConfig, Schema};
use train::optim::StateKind;
use train::optim::lr::Schedule;
use train::trainer::NonFinite;

fn valid() -> RawConfig {
    let mut raw = RawConfig::default();
    raw.data.text = vec!["a.txt".into()];
    raw
}

/// Validates a changed config and expects an error that has all `parts`.
#[track_caller]
fn refuses(change: impl Fn(&mut RawConfig), parts: &[&str]) {
    let mut raw = valid();
    change(&mut raw);
    match Plan::validate(raw) {
        Err(Error::Config(message)) => {
            for part in parts {
                assert!(message.contains(part), "{part:?} not in {message:?}");
            }
        }
        other => panic!("{parts:?}: {other:?}"),
    }
}

#[track_caller]
fn accepts(change: impl Fn(&mut RawConfig)) {
    let mut raw = valid();
    change(&mut raw);
    Plan::validate(raw).unwrap();
}

#[test]
fn model_values() {
    accepts(|_| ());
    refuses(
        |c| c.model.num_heads = 3,
        &["model.num_heads = 3", "model.d_model = 128"],
    );
    refuses(
        |c| c.model.num_heads = 0,
        &["model.num_heads = 0", "at least 1"],
    );
    refuses(|c| c.model.num_layers = 0, &["model.num_layers = 0"]);
    refuses(|c| c.model.d_model = 0, &["model.d_model = 0"]);
    refuses(|c| c.model.seq_len = 0, &["model.seq_len = 0"]);
    refuses(|c| c.model.vocab_size = Some(0), &["model.vocab_size = 0"]);
    refuses(
        |c| c.model.vocab_size = Some(1 << 33),
        &["model.vocab_size = 8589934592", "2^32"],
    );
    for dropout in [1.0, -0.1, f32::NAN] {
        refuses(|c| c.model.dropout = dropout, &["model.dropout", "below 1"]);
    }
    accepts(|c| c.model.dropout = 0.99);
    accepts(|c| (c.model.d_model = 1 << 16, c.model.num_layers = 16).1);
    for d_model in [1 << 20, 1 << 40, usize::MAX - 3] {
        refuses(
            |c| c.model.d_model = d_model,
            &["model.d_model = ", "more than 2^40 parameters"],
        );
    }
    refuses(
        |c| {
            (
                c.model.d_model = 4096,
                c.model.vocab_size = Some(u32::MAX as usize),
            )
                .1
        },
        &["model.vocab_size = 4294967295", "2^40"],
    );
    refuses(
        |c| c.model.num_layers = usize::MAX,
        &["model.num_layers = ", "2^40"],
    );
    refuses(|c| c.model.seq_len = 1 << 40, &["model.seq_len = ", "2^40"]);
}

#[test]
fn optimizer_values() {
    let eight_bit = |c: &mut RawConfig| c.optimizer.state = StateKind::EightBit;
    for block in [0, 32, 96, 4096] {
        refuses(
            |c| c.optimizer.block = block,
            &["optimizer.block", "64, 128"],
        );
    }
    for block in [64, 2048] {
        accepts(|c| (eight_bit(c), c.optimizer.block = block).1);
    }
    refuses(
        |c| c.optimizer.min_8bit_size = 4095,
        &["optimizer.min_8bit_size = 4095", "4096"],
    );
    refuses(|c| c.optimizer.beta1 = 1.0, &["optimizer.beta1 = 1.0"]);
    refuses(|c| c.optimizer.beta2 = f32::NAN, &["optimizer.beta2 = NaN"]);
    refuses(|c| c.optimizer.eps = 0.0, &["optimizer.eps = 0.0"]);
    refuses(
        |c| c.optimizer.eps = f32::INFINITY,
        &["optimizer.eps = inf"],
    );
    refuses(
        |c| c.optimizer.weight_decay = -1.0,
        &["optimizer.weight_decay = -1.0"],
    );
}

#[test]
fn a_schedule_that_ends_before_it_starts() {
    refuses(|c| c.lr.peak = f32::NAN, &["lr.peak = NaN"]);
    refuses(|c| c.lr.peak = -1.0, &["lr.peak = -1.0"]);
    refuses(|c| c.lr.min = 0.5, &["lr.min = 0.5", "lr.peak = 0.001"]);
    refuses(
        |c| c.train.steps = 100,
        &["lr.warmup_steps = 100", "train.steps = 100"],
    );
    accepts(|c| c.train.steps = 101);
    refuses(
        |c| c.lr.decay_end = Some(50),
        &["lr.warmup_steps = 100", "lr.decay_end = 50"],
    );
    refuses(
        |c| c.lr.decay_steps = Some(5),
        &["lr.decay_steps = 5", "wsd"],
    );
    let constant = |c: &mut RawConfig| c.lr.schedule = Schedule::Constant;
    refuses(
        |c| (constant(c), c.lr.decay_end = Some(500)).1,
        &["lr.decay_end = 500", "constant"],
    );
    refuses(
        |c| (constant(c), c.train.steps = 99).1,
        &["lr.warmup_steps = 100", "train.steps = 99"],
    );
    accepts(|c| (constant(c), c.train.steps = 100).1);
    accepts(|c| (constant(c), c.lr.min = 1.0).1);
    let wsd = |c: &mut RawConfig| c.lr.schedule = Schedule::Wsd;
    refuses(
        |c| (wsd(c), c.lr.decay_steps = Some(1901)).1,
        &["lr.decay_steps = 1901", "at most 1900"],
    );
    refuses(
        |c| (wsd(c), c.lr.decay_steps = Some(0)).1,
        &["lr.decay_steps = 0", "at least 1"],
    );
    refuses(
        |c| (wsd(c), c.train.steps = 110).1,
        &["lr.decay_steps = 22 (a fifth of the run)"],
    );
    accepts(|c| (wsd(c), c.lr.decay_steps = Some(1900)).1);
}

#[test]
fn training_values() {
    refuses(|c| c.train.steps = 0, &["train.steps = 0"]);
    refuses(|c| c.train.micro_batch = 0, &["train.micro_batch = 0"]);
    for global in [0, 12, 20] {
        refuses(
            |c| c.train.global_batch = Some(global),
            &["train.global_batch", "8 x 1"],
        );
    }
    accepts(|c| c.train.global_batch = Some(16));
    refuses(|c| c.train.threads = Some(0), &["train.threads = 0"]);
    refuses(
        |c| c.train.threads = Some(4000),
        &["train.threads = 4000", "1024"],
    );
    refuses(|c| c.train.grad_clip = -1.0, &["train.grad_clip = -1.0"]);
    refuses(|c| c.train.grad_clip = f32::NAN, &["train.grad_clip = NaN"]);
    accepts(|c| c.train.grad_clip = 0.0);
    refuses(|c| c.train.micro_batch = usize::MAX, &["2^64"]);
    refuses(|c| c.checkpoint.keep = 0, &["checkpoint.keep = 0"]);
    for timeout in [0, u64::MAX] {
        refuses(|c| c.comm.timeout_s = timeout, &["comm.timeout_s"]);
    }
    refuses(|c| c.metrics.log_every = 0, &["metrics.log_every = 0"]);
    for peak in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        refuses(
            |c| c.hardware.peak_tflops = Some(peak),
            &["hardware.peak_tflops"],
        );
    }
}

#[test]
fn settings_that_nothing_reads() {
    let no_effect = "has no effect";
    refuses(
        |c| c.optimizer.block = 512,
        &["optimizer.block = 512", no_effect, "optimizer.state"],
    );
    refuses(
        |c| c.optimizer.min_8bit_size = 8192,
        &["optimizer.min_8bit_size = 8192", no_effect],
    );
    refuses(
        |c| c.train.max_skips = 3,
        &["train.max_skips = 3", no_effect, "train.non_finite"],
    );
    accepts(|c| (c.train.non_finite = NonFinite::Skip, c.train.max_skips = 3).1);
}

#[test]
fn names_that_are_no_folder() {
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "a\\b", "/", "a\nb", long.as_str()] {
        refuses(
            |c| c.run.name = name.into(),
            &["run.name", "the name of a folder"],
        );
    }
    accepts(|c| c.run.name = "größe 1.5 (b)".into());
    refuses(|c| c.run.dir = "".into(), &["run.dir"]);
    refuses(|c| c.run.seed = u64::MAX, &["TOML"]);
}

#[test]
fn data_values_and_every_finding_at_once() {
    refuses(|c| c.data.text.clear(), &["data.text"]);
    refuses(|c| c.data.val_fraction = 1.0, &["data.val_fraction = 1"]);
    refuses(
        |c| (c.model.num_heads = 3, c.lr.peak = -1.0, c.train.steps = 0).0,
        &["model.num_heads = 3", "lr.peak = -1.0", "train.steps = 0"],
    );
}

#[test]
fn the_vocabulary_holds_the_tokenizer() {
    let mut raw = valid();
    assert_eq!(
        Plan::validate(raw.clone())
            .unwrap()
            .check_vocab(65)
            .unwrap(),
        65
    );
    raw.model.vocab_size = Some(128);
    let plan = Plan::validate(raw).unwrap();
    assert_eq!(plan.check_vocab(65).unwrap(), 128);
    assert_eq!(plan.check_vocab(128).unwrap(), 128);
    let message = plan.check_vocab(129).unwrap_err().to_string();
    assert!(
        message.contains("128") && message.contains("129"),
        "{message}"
    );
}

fn reload(plan: &Plan) -> RawConfig {
    RawConfig::from_sources("config.toml", plan.resolved_toml(), [], &[]).unwrap()
}

#[test]
fn the_resolved_config_is_readable() {
    let text = Plan::validate(valid()).unwrap().resolved_toml();
    assert!(
        text.contains("beta2 = 0.95\n") && text.contains("peak = 0.001\n"),
        "{text}"
    );
    assert!(text.contains("eps = 1e-8\n"), "{text}");
    assert!(text.starts_with("[run]\nname = \"run\"\n"), "{text}");
}

proptest! {
    #[test]
    fn the_resolved_config_loads_as_the_same_values(
        name in "[^/\\\\\\p{Cc}]{1,40}",
        texts in prop::collection::vec(any::<String>(), 1..4),
        rates in (0.0f32..1e30, 0.0f32..1.0, f32::MIN_POSITIVE..1.0),
        betas in (0.0f32..1.0, 0.0f32..1.0),
        seed in 0..=i64::MAX as u64,
        optional in (prop::option::of(1usize..500), prop::option::of(1e-300f64..1e300)),
        switches in any::<(bool, bool, Option<bool>)>(),
    ) {
        prop_assume!(name != "." && name != ".." && name.len() <= 255);
        let mut raw = valid();
        raw.run.name = name;
        raw.run.seed = seed;
        raw.data.text = texts;
        raw.lr.peak = rates.0;
        raw.lr.min = rates.0 * rates.1;
        raw.optimizer.eps = rates.2;
        (raw.optimizer.beta1, raw.optimizer.beta2) = betas;
        raw.train.threads = optional.0;
        raw.hardware.peak_tflops = optional.1;
        raw.model.bias = switches.0;
        raw.optimizer.state = if switches.1 { StateKind::EightBit } else { StateKind::F32 };
        raw.model.tie_embeddings = switches.2;
        let plan = Plan::validate(raw.clone()).unwrap();
        prop_assert_eq!(&reload(&plan), &raw);
        prop_assert_eq!(Plan::validate(reload(&plan)).unwrap(), plan);
    }

    #[test]
    fn arbitrary_settings_never_panic(
        key in prop_oneof![
            any::<String>(),
            "[a-z_.]{0,20}",
            prop::sample::select(Schema::get().keys.iter().map(|k| k.path.clone()).collect::<Vec<_>>()),
            prop::sample::select(Schema::get().sections.iter().map(|s| s.path.clone()).collect::<Vec<_>>()),
        ],
        value in prop_oneof![any::<String>(), "[-+0-9a-f.\\[\\]{}\"=, \n]{0,20}"],
        file in prop_oneof![any::<String>(), "[a-z.=\\[\\]\"0-9\n ]{0,40}", Just(String::new())],
    ) {
        let set = format!("{key}={value}");
        let variable = format!("TRAIN__{}", key.to_uppercase().replace('.', "__"));
        // With data, so that harmless settings get past validation.
        let data = || "data.text = [\"a\"]".to_owned();
        let loads = [
            RawConfig::from_sources("f", file, [], &[]),
            RawConfig::from_sources("f", data(), [], &[set]),
            RawConfig::from_sources("f", data(), [(variable.into(), value.into())], &[]),
        ];
        for raw in loads {
            match raw.and_then(Plan::validate) {
                Ok(plan) => prop_assert_eq!(&reload(&plan), plan.raw()),
                Err(error) => prop_assert_eq!(error.exit_status(), 2),
            }
        }
    }
}
