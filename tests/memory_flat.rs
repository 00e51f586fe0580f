//! Kept gradients hold the whole activation graph, and a run slowly fills the machine: memory is
//! counted to the byte. One test, because others would allocate beside it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use train::comm::Comm;
use train::model::{Gpt, ModelConfig};
use train::optim::OptimizerConfig;
use train::rng::{self, Purpose};
use train::zero::{Engine, EngineOptions, MicroBatch};

static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator with the arguments as they came; the counter
// does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller keeps alloc's contract, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: `pointer` came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEQ_LEN: usize = 16;
const VOCAB: usize = 53;

fn tokens(step: u64, count: usize) -> Vec<u32> {
    let token = |i: u64| (rng::hash(1, Purpose::Sample, step << 32 | i) % VOCAB as u64) as u32;
    (0..count as u64).map(token).collect()
}

#[test]
fn memory_is_flat_over_200_steps() {
    // A second thread would allocate its own buffers when it first gets work, whenever that is.
    train::runtime::start_workers(1).unwrap();
    for recompute_blocks in [false, true] {
        let config = ModelConfig {
            num_layers: 2,
            num_heads: 2,
            d_model: 32,
            seq_len: SEQ_LEN,
            dropout: 0.1,
            ..ModelConfig::default()
        };
        let model = Gpt::new(&config, VOCAB);
        let options = EngineOptions {
            seed: 1,
            grad_clip: 1.0,
            recompute_blocks,
            min_8bit_size: 4096,
            ..EngineOptions::default()
        };
        let optimizer = OptimizerConfig::default();
        let mut engine = Engine::new(model, &optimizer, Comm::solo().into(), options, |unit| {
            Ok(unit.buffer().initialize(1)?)
        })
        .unwrap();
        let mut live = Vec::with_capacity(22);
        for step in 0..220 {
            let batches = (0..2).map(|i| MicroBatch {
                first_sequence: i,
                inputs: tokens(2 * step, SEQ_LEN),
                targets: tokens(2 * step + 1, SEQ_LEN),
            });
            engine.train_step(step, 1e-3, 2 * SEQ_LEN, batches).unwrap();
            if step % 10 == 9 {
                let batch = (tokens(step, SEQ_LEN), tokens(step + 1, SEQ_LEN));
                engine.evaluate(std::iter::once(batch), || false).unwrap();
                live.push(LIVE_BYTES.load(Ordering::Relaxed));
            }
        }
        // rayon keeps some bytes a job for a while; one activation here has 2048.
        let (least, most) = (
            live[1..].iter().min().unwrap(),
            live[1..].iter().max().unwrap(),
        );
        assert!(
            most - least < 20 * 1024,
            "recompute {recompute_blocks}: {live:?}"
        );
    }
}
