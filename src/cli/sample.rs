//! `train sample`.

use std::path::PathBuf;

use super::{num_threads, print};
use crate::checkpoint;
use crate::comm::{self, Comm, CommOptions};
use crate::data::Tokenizer;
use crate::launch::{self, LaunchFlags};
use crate::model::Gpt;
use crate::rng::{self, Purpose};
use crate::zero::{Engine, EngineOptions};
use crate::{Error, Result, runtime};

/// Arguments of `train sample`.
#[derive(clap::Args)]
pub struct SampleArgs {
    /// Run folder.
    run: PathBuf,
    /// Text to continue.
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// Tokens to write.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Divides the logits: below 1 is safer, above 1 wilder, 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Draw among this many likeliest tokens only; 0 for all.
    #[arg(long, default_value_t = 200)]
    top_k: usize,
    /// Seed of the draws.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Compute threads of a rank; its share of the machine's cores when absent.
    #[arg(long, value_parser = num_threads())]
    threads: Option<usize>,
    #[command(flatten)]
    launch: LaunchFlags,
}

/// Writes text from the newest checkpoint.
pub fn sample(args: &SampleArgs) -> Result<()> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return Err(Error::Config(format!(
            "--temperature {}: must be a number from 0",
            args.temperature
        )));
    }
    let checkpoints = args.run.join("checkpoints");
    let Some(checkpoint) = checkpoint::latest(&checkpoints)? else {
        return Err(Error::Checkpoint(format!(
            "{} holds no checkpoint: give a run folder such as runs/quickstart",
            checkpoints.display()
        )));
    };
    let path = args.run.join("tokenizer.json");
    if !path.exists() {
        return Err(Error::Data(format!(
            "{} has no tokenizer.json: a run on token files has no tokenizer of its own. Set \
             data.tokenizer to the tokenizer.json of those tokens and --resume the run",
            args.run.display()
        )));
    }
    let tokenizer = Tokenizer::load(&path)?;
    let mut tokens = tokenizer.encode(&args.prompt).map_err(|e| match e {
        Error::Data(what) => Error::Config(format!("--prompt {:?}: {what}", args.prompt)),
        other => other,
    })?;
    if tokens.is_empty() {
        return Err(Error::Config(
            "--prompt: give at least one character".into(),
        ));
    }
    let launch = launch::discover(&args.launch)?;
    let threads = runtime::cores_each(launch.host_size);
    runtime::start_workers(args.threads.unwrap_or(threads))?;
    let comm = match launch::join(&launch, CommOptions::default())? {
        Some(bootstrap) => Comm::new(comm::connect(bootstrap)?)?,
        None => Comm::solo(),
    };
    let manifest = &checkpoint.manifest;
    let model = Gpt::new(&manifest.model, manifest.vocab_size);
    let longest = model.seq_len();
    let weights = checkpoint.weights()?;
    let options = EngineOptions::default();
    let engine = Engine::new(model, &manifest.optimizer, comm.into(), options, |unit| {
        weights.fill(unit)
    })?;
    // Every rank draws the same tokens from the same logits, and rank 0 writes them.
    let write = |text: &str| match launch.rank {
        0 => print(text),
        _ => Ok(()),
    };
    write(&args.prompt)?;
    let prompt_len = tokens.len();
    let mut printed = 0;
    for i in 0..args.tokens {
        let context = &tokens[tokens.len().saturating_sub(longest)..];
        let logits = engine.logits(context.to_vec())?;
        let logits = &logits[..tokenizer.vocab_size().min(logits.len())];
        let draw = rng::uniform(args.seed, Purpose::Text, i as u64);
        tokens.push(choose(logits, args.temperature, args.top_k, draw));
        // A character may span tokens: print what is complete.
        let text = tokenizer.decode(&tokens[prompt_len..])?;
        let complete = text.trim_end_matches('\u{fffd}');
        if let Some(new) = complete.get(printed..) {
            write(new)?;
            printed = complete.len();
        }
    }
    write("\n")
}

/// The token at quantile `draw` of the softmax of the `top_k` largest logits over `temperature`.
fn choose(logits: &[f32], temperature: f32, top_k: usize, draw: f32) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    if temperature == 0.0 {
        return order[0];
    }
    if top_k > 0 {
        order.truncate(top_k);
    }
    let max = logits[order[0] as usize];
    let weight = |&token: &u32| ((logits[token as usize] - max) / temperature).exp();
    let mut left = draw * order.iter().map(weight).sum::<f32>();
    for token in &order {
        left -= weight(token);
        if left < 0.0 {
            return *token;
        }
    }
    order[order.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 2.0f32.ln(), f32::NEG_INFINITY, 0.0];
        assert_eq!(choose(&logits, 0.0, 0, 0.9), 1);
        assert_eq!(choose(&logits, 1.0, 0, 0.49), 1);
        assert_eq!(choose(&logits, 1.0, 0, 0.51), 0);
        assert_eq!(choose(&logits, 1.0, 0, 0.76), 3);
        assert_eq!(choose(&logits, 1.0, 1, 0.99), 1);
    }
}
