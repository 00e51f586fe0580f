//! AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019), f32 or 8-bit moments.

use super::adamw_kernel::{Update, update_8bit, update_f32};
use super::state::{MomentSpec, PieceState, State};
use super::{Optimizer, OptimizerConfig, Segment, StateEntry, StateKind, StepInputs};
use crate::Result;
use crate::quant::DynamicMap;
use crate::simd::Isa;

/// AdamW over one shard.
///
/// 8-bit state is the first moment in the signed dynamic map and the second in the unsigned one
/// (8-bit Optimizers, sections 2.1 and 2.2). A second moment that is not zero keeps a code that is
/// not zero: if it fell to 0 beside larger ones while the first moment survived, a zero gradient
/// would next step by `lr * m / eps`. Rounded up to the smallest code it only makes steps smaller.
pub struct AdamW {
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    block: usize,
    state: State<2>,
    isa: Isa,
}

impl AdamW {
    /// Zero state for a shard of `shard_len` values.
    pub fn new(config: &OptimizerConfig, mut segments: Vec<Segment>, shard_len: usize) -> AdamW {
        for segment in &mut segments {
            segment.eight_bit &= config.state == StateKind::EightBit;
        }
        let specs = [
            MomentSpec {
                name: "exp_avg",
                absmax_name: "exp_avg.absmax",
                zero_code: DynamicMap::signed().zero_code(),
            },
            MomentSpec {
                name: "exp_avg_sq",
                absmax_name: "exp_avg_sq.absmax",
                zero_code: DynamicMap::unsigned().zero_code(),
            },
        ];
        AdamW {
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            weight_decay: config.weight_decay,
            block: config.block,
            state: State::new(segments, shard_len, config.block, specs),
            isa: Isa::best(),
        }
    }

    /// The same optimizer on one of [`Isa::supported`]; the default is the best of them.
    pub fn on(mut self, isa: Isa) -> AdamW {
        self.isa = isa;
        self
    }

    /// The constants of a step, worked out in f64.
    fn update(&self, inputs: &StepInputs, decay: bool) -> Update {
        let (beta1, beta2) = (f64::from(self.beta1), f64::from(self.beta2));
        let lr = f64::from(inputs.lr);
        let weight_decay = if decay {
            f64::from(self.weight_decay)
        } else {
            0.0
        };
        let updates = inputs.update as f64;
        Update {
            keep: (1.0 - lr * weight_decay) as f32,
            grad_scale: inputs.grad_scale,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: self.beta2,
            one_minus_beta2: (1.0 - beta2) as f32,
            denom_scale: (1.0 / (1.0 - beta2.powf(updates)).sqrt()) as f32,
            eps: self.eps,
            step_size: (lr / (1.0 - beta1.powf(updates))) as f32,
        }
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, inputs: &StepInputs, params: &mut [f32], grads: &[f32]) -> Result<()> {
        let updates = [false, true].map(|decay| self.update(inputs, decay));
        let (isa, block) = (self.isa, self.block);
        self.state
            .for_each_piece(params, grads, |segment, params, grads, moments| {
                let update = &updates[usize::from(segment.decay)];
                match moments {
                    [PieceState::F32(m), PieceState::F32(v)] => {
                        update_f32(isa, update, params, grads, m, v);
                    }
                    [
                        PieceState::EightBit {
                            codes: m,
                            scales: m_scales,
                        },
                        PieceState::EightBit {
                            codes: v,
                            scales: v_scales,
                        },
                    ] => update_8bit(isa, update, block, params, grads, m, m_scales, v, v_scales),
                    _ => unreachable!("both moments of a segment are of one kind"),
                }
            });
        Ok(())
    }

    fn state(&mut self) -> Vec<StateEntry<'_>> {
        self.state.entries()
    }

    fn segments(&self) -> &[Segment] {
        self.state.segments()
    }

    fn state_bytes(&self) -> usize {
        self.state.bytes()
    }
}
