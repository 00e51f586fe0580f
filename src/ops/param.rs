//! Parameters and the flat buffer of the unit that owns them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};
use rayon::prelude::*;

use super::rows;
use crate::rng::{self, Purpose};

/// Every large parameter starts on a multiple of this, and every block size divides it.
pub const ALIGN: usize = 2048;

/// Parameters with fewer elements lie in the plain region, which is never quantized.
pub const PLAIN_BELOW: usize = 4096;

/// First values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamInit {
    /// All the same.
    Constant(f32),
    /// Normal with mean 0.
    Normal { std: f32 },
    /// Uniform in `-bound..bound`.
    Uniform { bound: f32 },
}

/// One parameter of a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Full name, as in checkpoints: `h.3.attn.c_attn.weight`.
    pub name: String,
    /// Shape; linear weights are (inputs, outputs).
    pub shape: Vec<usize>,
    /// First values.
    pub init: ParamInit,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether optimizer state stays f32 whatever the config (StableEmbedding, 8-bit optimizers §2.3).
    pub keep_f32_state: bool,
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the parameter has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it lies in the unit's plain region.
    pub fn is_plain(&self) -> bool {
        self.len() < PLAIN_BELOW
    }
}

/// Where a unit's parameters lie in its flat buffer: large tensors first, each on a multiple of
/// [`ALIGN`], then the plain region of small ones, packed; padding is zero and stays zero.
///
/// What a quantizer does to a block thus depends on the parameter alone.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitLayout {
    /// Parameters, in the order the model declared them.
    pub params: Vec<ParamSpec>,
    /// Offset of each parameter in elements.
    pub offsets: Vec<usize>,
    /// Start of the plain region, a multiple of [`ALIGN`].
    pub plain_start: usize,
    /// Elements of the buffer, a multiple of [`ALIGN`].
    pub num_elements: usize,
}

impl UnitLayout {
    /// Lays out `params`.
    pub fn new(params: Vec<ParamSpec>) -> Self {
        let mut offsets = vec![0; params.len()];
        let mut end = 0usize;
        for (offset, param) in offsets.iter_mut().zip(&params) {
            if !param.is_plain() {
                *offset = end;
                end = (end + param.len()).next_multiple_of(ALIGN);
            }
        }
        let plain_start = end;
        for (offset, param) in offsets.iter_mut().zip(&params) {
            if param.is_plain() {
                *offset = end;
                end += param.len();
            }
        }
        Self {
            params,
            offsets,
            plain_start,
            num_elements: end.next_multiple_of(ALIGN),
        }
    }

    /// Elements that belong to parameters (the rest is padding).
    pub fn num_params(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// Where parameter `index` lies.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = self.offsets[index];
        start..start + self.params[index].len()
    }

    /// The gaps between parameters, and what follows them up to `len`.
    fn padding(&self, len: usize) -> Vec<Range<usize>> {
        let mut places: Vec<_> = (0..self.params.len()).map(|i| self.range(i)).collect();
        places.sort_by_key(|place| place.start);
        let mut end = 0;
        let mut gaps = Vec::new();
        for place in places {
            gaps.push(end..place.start);
            end = place.end;
        }
        gaps.push(end..len);
        gaps
    }
}

/// A unit's weights and gradients: one flat tensor each.
///
/// Both are empty until somebody lends them (or writes weights): a rank that owns a part of a unit
/// holds the whole only while it is used.
pub struct UnitBuffer {
    layout: UnitLayout,
    weights: Tensor,
    grads: Tensor,
    /// Whether the parameter's gradient was written since the last [`UnitBuffer::clear_grads`]. The
    /// first writer overwrites, which saves a pass that clears.
    written: Vec<AtomicBool>,
}

impl UnitBuffer {
    /// A buffer without storage.
    pub fn new(layout: UnitLayout) -> Arc<Self> {
        let empty = || rows::tensor(Vec::new(), layout.num_elements);
        Arc::new(Self {
            weights: empty(),
            grads: empty(),
            written: layout
                .params
                .iter()
                .map(|_| AtomicBool::new(false))
                .collect(),
            layout,
        })
    }

    /// Makes `values`, at least as many as the unit has elements, the weights.
    ///
    /// # Errors
    /// When candle refuses access to the storage.
    pub fn lend_weights(&self, values: Vec<f32>) -> Result<()> {
        debug_assert!(values.len() >= self.layout.num_elements);
        with_storage(&self.weights, |storage| {
            *storage = values;
            Ok(())
        })
    }

    /// Takes the storage of the weights; reading them fails until they are lent again.
    ///
    /// # Errors
    /// When candle refuses access to the storage.
    pub fn take_weights(&self) -> Result<Vec<f32>> {
        with_storage(&self.weights, |storage| Ok(std::mem::take(storage)))
    }

    /// Makes `values`, at least as many as the unit has elements and whatever they hold, the
    /// storage of a stale gradient.
    ///
    /// # Errors
    /// When candle refuses access to the storage.
    pub fn lend_grads(&self, mut values: Vec<f32>) -> Result<()> {
        debug_assert!(values.len() >= self.layout.num_elements);
        self.clear_grads();
        for gap in self.layout.padding(values.len()) {
            values[gap].fill(0.0);
        }
        with_storage(&self.grads, |storage| {
            *storage = values;
            Ok(())
        })
    }

    /// Gives back gradients that [`UnitBuffer::take_grads`] took: they are not stale.
    ///
    /// # Errors
    /// When candle refuses access to the storage.
    pub fn return_grads(&self, values: Vec<f32>) -> Result<()> {
        with_storage(&self.grads, |storage| {
            *storage = values;
            Ok(())
        })
    }

    /// Takes the storage of the gradient.
    ///
    /// # Errors
    /// When candle refuses access to the storage.
    pub fn take_grads(&self) -> Result<Vec<f32>> {
        with_storage(&self.grads, |storage| Ok(std::mem::take(storage)))
    }

    /// Whether the gradient has storage.
    pub fn has_grads(&self) -> bool {
        rows::with_values(&self.grads, |_| Ok(())).is_ok()
    }

    /// Where the parameters lie.
    pub fn layout(&self) -> &UnitLayout {
        &self.layout
    }

    /// The handle of the parameter `name` (the part after the unit's own prefix is not enough).
    pub fn param(self: &Arc<Self>, name: &str) -> Option<Param> {
        let index = self.layout.params.iter().position(|p| p.name == name)?;
        Some(Param {
            buffer: self.clone(),
            index,
        })
    }

    /// Handles of all parameters, in declared order.
    pub fn params(self: &Arc<Self>) -> Vec<Param> {
        (0..self.layout.params.len())
            .map(|index| Param {
                buffer: self.clone(),
                index,
            })
            .collect()
    }

    /// Fills the weights from `seed`.
    pub fn initialize(&self, seed: u64) -> Result<()> {
        self.lend_weights(self.initial_values(0..self.layout.num_elements, seed))
    }

    /// The first values of a range of the flat buffer, which may reach past its end: padding is
    /// zero. A parameter's values depend on the seed, its name and the position in it, so they are
    /// the same in every layout and on every rank.
    pub fn initial_values(&self, range: Range<usize>, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; range.len()];
        for (index, param) in self.layout.params.iter().enumerate() {
            let place = self.layout.range(index);
            let (start, end) = (place.start.max(range.start), place.end.min(range.end));
            if start >= end {
                continue;
            }
            let seed = seed ^ name_hash(&param.name);
            let first = (start - place.start) as u64;
            values[start - range.start..end - range.start]
                .par_iter_mut()
                .enumerate()
                .for_each(|(i, w)| {
                    let i = first + i as u64;
                    *w = match param.init {
                        ParamInit::Constant(value) => value,
                        ParamInit::Normal { std } => std * rng::normal(seed, Purpose::Init, i),
                        ParamInit::Uniform { bound } => {
                            bound * (2.0 * rng::uniform(seed, Purpose::Init, i) - 1.0)
                        }
                    }
                });
        }
        values
    }

    /// Declares the gradient stale: the next writer of each parameter overwrites it.
    pub fn clear_grads(&self) {
        for written in &self.written {
            written.store(false, Ordering::Relaxed);
        }
    }

    /// Names of the parameters whose gradient nobody wrote since [`UnitBuffer::clear_grads`].
    pub fn without_grad(&self) -> impl Iterator<Item = &str> {
        let written = self.written.iter();
        let params = self.layout.params.iter().zip(written);
        params.filter_map(|(p, written)| {
            (!written.load(Ordering::Relaxed)).then_some(p.name.as_str())
        })
    }

    /// Calls `f` with the flat weights.
    pub fn with_weights<R>(&self, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
        rows::with_values(&self.weights, f)
    }

    /// Calls `f` with the flat weights, to change.
    pub fn with_weights_mut<R>(&self, f: impl FnOnce(&mut [f32]) -> Result<R>) -> Result<R> {
        with_storage(&self.weights, |values| f(self.allocated(values)))
    }

    /// `storage`, of zeros if it was empty.
    fn allocated<'a>(&self, storage: &'a mut Vec<f32>) -> &'a mut [f32] {
        if storage.is_empty() {
            *storage = vec![0.0; self.layout.num_elements];
        }
        storage
    }

    /// Calls `f` with the flat gradient.
    pub fn with_grads<R>(&self, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
        rows::with_values(&self.grads, f)
    }

    /// Calls `f` with the flat weights, to change, and the flat gradient.
    pub fn with_step<R>(&self, f: impl FnOnce(&mut [f32], &[f32]) -> Result<R>) -> Result<R> {
        rows::with_values(&self.grads, |grads| {
            with_storage(&self.weights, |weights| f(weights, grads))
        })
    }
}

/// FNV-1a: keeps parameters' random streams apart.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Calls `f` with the storage of a flat CPU tensor. candle hands storage out mutably only to
/// in-place ops, so this is one.
fn with_storage<R>(tensor: &Tensor, f: impl FnOnce(&mut Vec<f32>) -> Result<R>) -> Result<R> {
    struct Visit<F, R>(Mutex<(Option<F>, Option<R>)>);

    impl<R, F: FnOnce(&mut Vec<f32>) -> Result<R>> InplaceOp1 for Visit<F, R> {
        fn name(&self) -> &'static str {
            "visit"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            let CpuStorage::F32(values) = storage else {
                bail!("a unit's buffer is f32")
            };
            let mut slot = self.0.lock().expect("no visitor panicked");
            if let Some(f) = slot.0.take() {
                slot.1 = Some(f(values)?);
            }
            Ok(())
        }
    }

    let visit = Visit(Mutex::new((Some(f), None)));
    tensor.inplace_op1(&visit)?;
    match visit.0.into_inner().expect("no visitor panicked").1 {
        Some(result) => Ok(result),
        None => bail!("candle did not run the in-place op"),
    }
}

/// A parameter: a place in a unit's buffer.
#[derive(Clone)]
pub struct Param {
    buffer: Arc<UnitBuffer>,
    index: usize,
}

impl Param {
    /// Its name, shape and how it starts.
    pub fn spec(&self) -> &ParamSpec {
        &self.buffer.layout.params[self.index]
    }

    /// The last dimension: outputs of a linear weight, width of an embedding.
    pub fn width(&self) -> usize {
        *self.spec().shape.last().unwrap_or(&1)
    }

    /// The dimension before the last: inputs of a linear weight, rows of an embedding.
    pub fn height(&self) -> usize {
        self.spec().len() / self.width()
    }

    /// Calls `f` with the values.
    pub fn read<R>(&self, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
        let range = self.buffer.layout.range(self.index);
        self.buffer
            .with_weights(|weights| match weights.get(range) {
                Some(values) => f(values),
                None => bail!("{}: past the end of its unit", self.spec().name),
            })
    }

    /// Overwrites the values.
    pub fn write(&self, values: &[f32]) -> Result<()> {
        let range = self.buffer.layout.range(self.index);
        self.buffer.with_weights_mut(|weights| {
            weights[range].copy_from_slice(values);
            Ok(())
        })
    }

    /// Calls `f(gradient, fresh)`. With `fresh` the gradient holds stale values and `f` overwrites
    /// all of them; otherwise it adds.
    pub fn accumulate<R>(&self, f: impl FnOnce(&mut [f32], bool) -> Result<R>) -> Result<R> {
        let fresh = !self.buffer.written[self.index].swap(true, Ordering::Relaxed);
        let range = self.buffer.layout.range(self.index);
        with_storage(&self.buffer.grads, |grads| match grads.get_mut(range) {
            Some(values) => f(values, fresh),
            None => bail!("{}: nobody lent it a gradient", self.spec().name),
        })
    }

    /// A copy of the gradient, for tests and reports.
    pub fn grad(&self) -> Result<Vec<f32>> {
        let range = self.buffer.layout.range(self.index);
        self.buffer.with_grads(|grads| Ok(grads[range].to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(name: usize, len: usize) -> ParamSpec {
        ParamSpec {
            name: format!("p{name}"),
            shape: vec![len],
            init: ParamInit::Normal { std: 1.0 },
            decay: true,
            keep_f32_state: false,
        }
    }

    proptest! {
        #[test]
        fn every_element_has_one_place(lens in prop::collection::vec(1usize..20_000, 1..12)) {
            let layout = UnitLayout::new(lens.iter().enumerate().map(|(i, &n)| spec(i, n)).collect());
            let mut owner = vec![None; layout.num_elements];
            for (i, &len) in lens.iter().enumerate() {
                let range = layout.range(i);
                prop_assert!(len < PLAIN_BELOW || range.start.is_multiple_of(ALIGN));
                prop_assert_eq!(len < PLAIN_BELOW, range.start >= layout.plain_start);
                for slot in &mut owner[range] {
                    prop_assert!(slot.replace(i).is_none());
                }
            }
            prop_assert_eq!(layout.num_elements % ALIGN, 0);
            let used = owner.iter().flatten().count();
            prop_assert_eq!(used, layout.num_params());
        }
    }

    #[test]
    fn initial_values_do_not_depend_on_the_layout() {
        let alone = UnitBuffer::new(UnitLayout::new(vec![spec(1, 5000)]));
        let behind = UnitBuffer::new(UnitLayout::new(vec![spec(0, 5000), spec(1, 5000)]));
        alone.initialize(3).unwrap();
        behind.initialize(3).unwrap();
        let read = |buffer: &Arc<UnitBuffer>, name: &str| {
            buffer
                .param(name)
                .unwrap()
                .read(|v| Ok(v.to_vec()))
                .unwrap()
        };
        assert_eq!(read(&alone, "p1"), read(&behind, "p1"));
        assert_ne!(read(&behind, "p0"), read(&behind, "p1"));
        let values = read(&alone, "p1");
        let mean = values.iter().sum::<f32>() / 5000.0;
        let var = values.iter().map(|v| v * v).sum::<f32>() / 5000.0;
        assert!(
            mean.abs() < 0.06 && (var - 1.0).abs() < 0.08,
            "{mean} {var}"
        );
    }

    #[test]
    fn the_first_gradient_overwrites_and_the_next_adds() {
        let buffer = UnitBuffer::new(UnitLayout::new(vec![spec(0, 3), spec(1, 3)]));
        let param = buffer.param("p0").unwrap();
        let add = || param.accumulate(|_, _| Ok(()));
        assert!(add().unwrap_err().to_string().contains("p0: nobody lent"));
        // What the lender left there does not show.
        buffer.lend_grads(vec![f32::NAN; ALIGN]).unwrap();
        for value in [1.0, 2.0] {
            param
                .accumulate(|grad, fresh| {
                    rows::store_sums(grad, &[value; 3], fresh);
                    Ok(())
                })
                .unwrap();
        }
        assert_eq!(param.grad().unwrap(), [3.0; 3]);
        let padding = buffer.with_grads(|g| Ok(g[6..].iter().all(|g| *g == 0.0)));
        assert!(padding.unwrap());
        assert_eq!(buffer.without_grad().collect::<Vec<_>>(), ["p1"]);
        buffer.clear_grads();
        assert_eq!(buffer.without_grad().count(), 2);
    }
}
