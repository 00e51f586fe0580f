//! File < environment < --set, and what each says when it is wrong.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use train::Error;
use train::config::{Plan, RawConfig, Schema, reference};
use train::optim::StateKind;

fn load(text: &str, env: &[(&str, &str)], sets: &[&str]) -> Result<RawConfig, String> {
    let env = env
        .iter()
        .map(|(k, v)| (OsString::from(k), OsString::from(v)));
    let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
    RawConfig::from_sources("run.toml", text.into(), env, &sets).map_err(|e| match e {
        Error::Config(message) => message,
        other => panic!("{other:?}"),
    })
}

/// Loads and expects an error that has all `parts`.
#[track_caller]
fn fails(text: &str, env: &[(&str, &str)], sets: &[&str], parts: &[&str]) {
    let message = load(text, env, sets).expect_err(text);
    for part in parts {
        assert!(message.contains(part), "{part:?} not in {message:?}");
    }
}

#[test]
fn later_sources_win() {
    let file = "[lr]\npeak = 1.0\nmin = 0.5\nwarmup_steps = 3\n";
    let env = [
        ("TRAIN__LR__MIN", "0.25"),
        ("TRAIN__LR__WARMUP_STEPS", "4"),
        ("PATH", "x"),
    ];
    let raw = load(file, &env, &["lr.warmup_steps=5", "lr.warmup_steps=6"]).unwrap();
    assert_eq!(
        (raw.lr.peak, raw.lr.min, raw.lr.warmup_steps),
        (1.0, 0.25, 6)
    );
    assert_eq!(raw.model, RawConfig::default().model);
}

#[test]
fn values_from_outside_the_file_have_the_type_of_their_key() {
    let env = [
        ("TRAIN__RUN__NAME", "123"),
        ("TRAIN__LR__PEAK", "5e-5"),
        ("TRAIN__OPTIMIZER__STATE", "8bit"),
        ("TRAIN__DATA__TEXT", "corpus.txt"),
        ("TRAIN__METRICS__TENSORBOARD", "false"),
        ("TRAIN__HARDWARE__PEAK_TFLOPS", "2"),
    ];
    let sets = [
        "data.extensions=[\"a\", \"b\"]",
        "run.dir=true",
        "model.vocab_size=300",
    ];
    let raw = load("", &env, &sets).unwrap();
    assert_eq!(raw.run.name, "123");
    assert_eq!(raw.lr.peak, 5e-5);
    assert_eq!(raw.optimizer.state, StateKind::EightBit);
    assert_eq!(raw.data.text, ["corpus.txt"]);
    assert_eq!(raw.data.extensions, ["a", "b"]);
    assert!(!raw.metrics.tensorboard);
    assert_eq!(raw.hardware.peak_tflops, Some(2.0));
    assert_eq!(raw.run.dir, PathBuf::from("true"));
    assert_eq!(raw.model.vocab_size, Some(300));
    let shards = "data.shards={ train = \"a.bin\", val = \"b.bin\", vocab_size = 9 }";
    let sets = [shards, "data.shards.val=c.bin"];
    let shards = load("", &[], &sets).unwrap().data.shards.unwrap();
    assert_eq!((shards.train, shards.val), ("a.bin".into(), "c.bin".into()));
}

#[test]
fn an_unknown_key_is_named_with_its_source_and_the_nearest_key() {
    let near = [
        "unknown key model.num_layer",
        "did you mean model.num_layers?",
    ];
    let with = |source| [&near[..], &[source]].concat();
    fails(
        "[model]\nd_model = 8\nnum_layer = 4\n",
        &[],
        &[],
        &with("run.toml:3"),
    );
    fails("model.num_layer = 4", &[], &[], &with("run.toml:1"));
    fails(
        "",
        &[("TRAIN__MODEL__NUM_LAYER", "4")],
        &[],
        &with("TRAIN__MODEL__NUM_LAYER"),
    );
    fails("", &[], &["model.num_layer=4"], &with("--set"));
    fails(
        "[modle]\n",
        &[],
        &[],
        &["unknown key modle", "did you mean model?"],
    );
    fails(
        "[model]\nqqqqqqqq = 1",
        &[],
        &[],
        &["[model] has num_layers, num_heads"],
    );
    fails("qqqqqqqqqqqq = 1", &[], &[], &["sections are [run] [data]"]);
    fails(
        "[model]\nmicro_batch = 1",
        &[],
        &[],
        &["did you mean train.micro_batch?"],
    );
    fails(
        "",
        &[],
        &["data.shards={ trian = \"a\" }"],
        &["data.shards.trian", "data.shards.train?"],
    );
    fails(
        "",
        &[],
        &["run.name"],
        &["run.name", "--set section.key=value"],
    );
    fails("", &[], &["=1"], &["unknown key"]);
    fails(
        "",
        &[],
        &["model.num_layers.x=1"],
        &["unknown key model.num_layers.x"],
    );
}

#[test]
fn a_wrong_type_is_named_with_value_source_and_the_right_type() {
    let whole = "expected a whole number, at least 0";
    fails(
        "[model]\n\nnum_layers = \"four\"",
        &[],
        &[],
        &["model.num_layers = \"four\"", "run.toml:3", whole],
    );
    fails(
        "[model]\nnum_layers = -4",
        &[],
        &[],
        &["model.num_layers = -4", "run.toml:2", whole],
    );
    fails(
        "",
        &[],
        &["train.steps=1e5"],
        &["train.steps = 100000.0", "--set", whole],
    );
    fails(
        "",
        &[("TRAIN__LR__PEAK", "fast")],
        &[],
        &[
            "lr.peak = \"fast\"",
            "variable TRAIN__LR__PEAK",
            "expected a number",
        ],
    );
    fails(
        "[run]\nname = 123",
        &[],
        &[],
        &["run.name = 123", "run.toml:2", "expected text"],
    );
    fails(
        "",
        &[],
        &["optimizer.state=16bit"],
        &[
            "optimizer.state = \"16bit\"",
            "--set",
            "one of \"f32\", \"8bit\"",
        ],
    );
    fails(
        "[lr]\nschedule = \"step\"",
        &[],
        &[],
        &[
            "lr.schedule = \"step\"",
            "\"constant\", \"linear\", \"cosine\", \"wsd\"",
        ],
    );
    fails(
        "[data]\ntext = [\"a\", 1]",
        &[],
        &[],
        &["data.text = [\"a\",1]", "a list, each item text"],
    );
    fails(
        "[data]\ntext = \"a\"",
        &[],
        &[],
        &["data.text = \"a\"", "a list, each item text"],
    );
    fails(
        "[metrics]\ntensorboard = 1",
        &[],
        &[],
        &["metrics.tensorboard = 1", "true or false"],
    );
    fails(
        "model = 3",
        &[],
        &[],
        &["model = 3", "run.toml:1", "a table [model]"],
    );
    fails(
        "",
        &[],
        &["model=3"],
        &["model = 3", "--set", "a table [model]"],
    );
    fails(
        "[data.shards]\ntrain = \"a\"\nvocab_size = 4",
        &[],
        &[],
        &["data.shards.val is missing", "text"],
    );
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("absent.toml");
    match RawConfig::load(&path, &[]) {
        Err(Error::Config(message)) => assert!(message.contains("absent.toml"), "{message}"),
        other => panic!("{other:?}"),
    }
    fails(
        "[model\n",
        &[],
        &[],
        &["run.toml is not valid TOML", "line 1"],
    );
    fails(
        "[run]\nseed = 1\nseed = 2\n",
        &[],
        &[],
        &["run.toml is not valid TOML", "seed"],
    );
}

#[test]
fn the_reference_has_every_key_with_its_doc_and_loads_as_the_default() {
    let text = reference();
    fn keys(value: &serde_json::Value, prefix: &str, out: &mut Vec<String>) {
        for (name, value) in value.as_object().unwrap() {
            let path = format!("{prefix}{name}");
            match value {
                serde_json::Value::Object(_) => keys(value, &format!("{path}."), out),
                _ => out.push(path),
            }
        }
    }
    let mut paths = Vec::new();
    keys(
        &serde_json::to_value(RawConfig::default()).unwrap(),
        "",
        &mut paths,
    );
    assert!(paths.len() > 40, "{paths:?}");
    for path in paths.iter().filter(|p| *p != "data.shards") {
        let key = Schema::get()
            .key(path)
            .unwrap_or_else(|| panic!("{path} is not in the schema"));
        let (section, name) = path.rsplit_once('.').unwrap();
        assert!(key.doc.len() > 5, "{path} has no doc");
        let of_section = text.split_once(&format!("\n[{section}]\n")).unwrap().1;
        let of_section = of_section.split("\n[").next().unwrap();
        let entry = of_section
            .split("\n\n")
            .find(|e| e.contains(&format!("\n{name} = ")) || e.contains(&format!("\n# {name} = ")))
            .unwrap_or_else(|| panic!("{path} is not in the reference"));
        let doc = key.doc.replace('\n', "\n# ");
        assert!(entry.contains(&doc), "{path}: {entry}");
    }
    for section in &Schema::get().sections {
        assert!(
            section.doc.len() > 5 && text.contains(&section.doc.replace('\n', "\n# ")),
            "{section:?}"
        );
    }
    assert!(Schema::get().section("data.shards").is_some() && text.contains("# [data.shards]"));
    assert_eq!(load(&text, &[], &[]).unwrap(), RawConfig::default());
}

#[test]
fn a_plan_loads_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    let text = "[data]\ntext = [\"a.txt\"]\n[train]\nglobal_batch = 24\n";
    std::fs::write(&path, text).unwrap();
    let plan = Plan::load(
        Path::new(&path),
        &["run.name=x".into(), "run.dir=out".into()],
    )
    .unwrap();
    assert_eq!(plan.run_dir, PathBuf::from("out/x"));
    assert_eq!((plan.micro_steps, plan.global_batch), (3, 24));
    assert_eq!(plan.tokens_per_step(), 24 * plan.raw().model.seq_len);
    assert!(plan.threads >= 1);
}

#[test]
fn an_impossible_value_is_named_with_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    std::fs::write(&path, "[data]\ntext = [\"a\"]\n\n[model]\nd_model = 100\n").unwrap();
    let message = Plan::load(&path, &["model.num_heads=3".into()])
        .unwrap_err()
        .to_string();
    let from = format!(
        "(model.num_heads from --set, model.d_model from {}:5)",
        path.display()
    );
    assert!(message.ends_with(&from), "{message}");
    // At its default, num_heads has no source to name.
    let message = Plan::load(&path, &["model.d_model=1".into()])
        .unwrap_err()
        .to_string();
    assert!(message.ends_with("(model.d_model from --set)"), "{message}");
}
