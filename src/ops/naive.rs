//! The same functions from plain candle ops in f64, and the harness that holds the fused ops against them.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{CustomOp1, CustomOp2, D, DType, Device, Result, Tensor, Var};

use super::{Param, ParamInit, ParamSpec, Tape, UnitBuffer, UnitLayout};
use crate::rng::{self, Purpose};

pub type Weights = HashMap<String, Tensor>;

pub fn linear(x: &Tensor, w: &Tensor, b: Option<&Tensor>) -> Result<Tensor> {
    let y = x.broadcast_matmul(w)?;
    match b {
        Some(b) => y.broadcast_add(b),
        None => Ok(y),
    }
}

pub fn layer_norm(x: &Tensor, w: &Tensor, b: Option<&Tensor>) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let var = centered.sqr()?.mean_keepdim(D::Minus1)?;
    let y = centered
        .broadcast_div(&(var + 1e-5)?.sqrt()?)?
        .broadcast_mul(w)?;
    match b {
        Some(b) => y.broadcast_add(b),
        None => Ok(y),
    }
}

pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let u = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * 0.5)? * (u.tanh()? + 1.0)?
}

/// `mask` multiplies the probabilities, (B, H, S, S).
pub fn attention(qkv: &Tensor, num_heads: usize, mask: Option<&Tensor>) -> Result<Tensor> {
    let (b, s, width3) = qkv.dims3()?;
    let (d, head) = (width3 / 3, width3 / 3 / num_heads);
    let part = |i: usize| {
        let x = qkv.narrow(2, i * d, d)?.reshape((b, s, num_heads, head))?;
        x.transpose(1, 2)?.contiguous()
    };
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let scores = (q.matmul(&k.transpose(2, 3)?)? / (head as f64).sqrt())?;
    let later: Vec<f64> = (0..s * s)
        .map(|i| {
            if i % s > i / s {
                f64::NEG_INFINITY
            } else {
                0.0
            }
        })
        .collect();
    let later = Tensor::from_vec(later, (s, s), qkv.device())?.to_dtype(qkv.dtype())?;
    let mut p = candle_nn::ops::softmax(&scores.broadcast_add(&later)?, D::Minus1)?;
    if let Some(mask) = mask {
        p = (p * mask)?;
    }
    p.matmul(&v)?.transpose(1, 2)?.reshape((b, s, d))
}

/// Sum over positions; logits (.., V).
pub fn cross_entropy(logits: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let logits = logits.reshape((targets.len(), ()))?;
    let targets = Tensor::from_slice(targets, targets.len(), logits.device())?;
    candle_nn::loss::cross_entropy(&logits, &targets)? * targets.elem_count() as f64
}

/// Parameters and inputs for one comparison of a fused op with its twin, which runs in f64.
pub struct Check {
    buffer: Arc<UnitBuffer>,
}

impl Check {
    pub fn new(params: &[(&str, &[usize])]) -> Self {
        let spec = |&(name, shape): &(&str, &[usize])| ParamSpec {
            name: name.into(),
            shape: shape.to_vec(),
            init: ParamInit::Normal { std: 0.5 },
            decay: false,
            keep_f32_state: false,
        };
        let buffer = UnitBuffer::new(UnitLayout::new(params.iter().map(spec).collect()));
        buffer.initialize(1).unwrap();
        let len = buffer.layout().num_elements;
        buffer.lend_grads(vec![0.0; len]).unwrap();
        Self { buffer }
    }

    pub fn param(&self, name: &str) -> Param {
        self.buffer.param(name).unwrap()
    }

    /// Names of parameters without a gradient.
    pub fn untouched(&self) -> Vec<&str> {
        self.buffer.without_grad().collect()
    }

    pub fn input(&self, which: u64, shape: &[usize]) -> Tensor {
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n as u64)
            .map(|i| rng::normal(9 + which, Purpose::Init, i))
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    fn weights(&self) -> HashMap<String, Var> {
        let params = self.buffer.params();
        let to_var = |p: &Param| {
            let values = p.read(|v| Ok(v.to_vec())).unwrap();
            let t = Tensor::from_vec(values, p.spec().shape.as_slice(), &Device::Cpu).unwrap();
            Var::from_tensor(&t.to_dtype(DType::F64).unwrap()).unwrap()
        };
        params
            .iter()
            .map(|p| (p.spec().name.clone(), to_var(p)))
            .collect()
    }

    pub fn agrees1<C: CustomOp1 + 'static>(
        &self,
        params: &[&str],
        x: &Tensor,
        op: C,
        twin: impl Fn(&Weights, &Tensor) -> Result<Tensor>,
    ) {
        let tape = Tape::recording();
        let y = tape.apply1(x, op).unwrap();
        self.compare(params, tape, y, &[x], |w, xs| twin(w, &xs[0]));
    }

    pub fn agrees2<C: CustomOp2 + 'static>(
        &self,
        params: &[&str],
        (x, y): (&Tensor, &Tensor),
        op: C,
        twin: impl Fn(&Weights, &Tensor, &Tensor) -> Result<Tensor>,
    ) {
        let tape = Tape::recording();
        let z = tape.apply2(x, y, op).unwrap();
        self.compare(params, tape, z, &[x, y], |w, xs| twin(w, &xs[0], &xs[1]));
    }

    fn compare(
        &self,
        params: &[&str],
        tape: Tape,
        y: Tensor,
        xs: &[&Tensor],
        twin: impl Fn(&Weights, &[Tensor]) -> Result<Tensor>,
    ) {
        let upstream = match y.rank() {
            0 => y.ones_like().unwrap(),
            _ => self.input(77, y.dims()),
        };
        let dxs = tape.gradients(&y, upstream.clone()).unwrap();
        let dx = &dxs[&xs[0].id()];

        let weights = self.weights();
        let tensors: Weights = weights
            .iter()
            .map(|(k, v)| (k.clone(), v.as_tensor().clone()))
            .collect();
        let vars: Vec<Var> = xs
            .iter()
            .map(|x| Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap())
            .collect();
        let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let expected = twin(&tensors, &inputs).unwrap();
        close("output", &y, &expected);
        let upstream = upstream.to_dtype(DType::F64).unwrap();
        let grads = (&expected * &upstream)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        for (i, (x, var)) in xs.iter().zip(&vars).enumerate() {
            close(
                &format!("gradient {i}"),
                &dxs[&x.id()],
                grads.get(var).unwrap(),
            );
        }
        for name in params {
            let param = self.param(name);
            let grad = Tensor::from_vec(
                param.grad().unwrap(),
                param.spec().shape.as_slice(),
                &Device::Cpu,
            )
            .unwrap();
            close(name, &grad, grads.get(&weights[*name]).unwrap());
        }
        self.buffer.clear_grads();

        // The twin itself against finite differences, in a few directions.
        for direction in 0..3 {
            let d = self
                .input(100 + direction, xs[0].dims())
                .to_dtype(DType::F64)
                .unwrap();
            let h = 1e-5;
            let at = |sign: f64| {
                let mut moved = inputs.iter().map(|x| x.detach()).collect::<Vec<_>>();
                moved[0] = (&moved[0] + (&d * (sign * h)).unwrap()).unwrap();
                let y = twin(&tensors, &moved).unwrap();
                (y * &upstream)
                    .unwrap()
                    .sum_all()
                    .unwrap()
                    .to_scalar::<f64>()
                    .unwrap()
            };
            let slope = (at(1.0) - at(-1.0)) / (2.0 * h);
            let dot = (&d * dx.to_dtype(DType::F64).unwrap())
                .unwrap()
                .sum_all()
                .unwrap();
            let dot = dot.to_scalar::<f64>().unwrap();
            assert!(
                (slope - dot).abs() < 1e-3 * (1.0 + slope.abs()),
                "slope {slope}, gradient {dot}"
            );
        }
    }
}

/// Equal to 2e-5 of the largest value.
fn close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.dims(), want.dims(), "shape of {what}");
    let got: Vec<f64> = got
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    let want: Vec<f64> = want.flatten_all().unwrap().to_vec1().unwrap();
    let largest = want.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!(
            (g - w).abs() < 2e-5 * largest,
            "{what}[{i}]: {g}, expected {w} (largest {largest})"
        );
    }
}
