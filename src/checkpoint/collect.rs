//! Tensors of the model states on their way into a file: those of a shard, or put together.

use std::borrow::Cow;
use std::collections::HashMap;

use safetensors::{Dtype, SafeTensors, View};

use crate::comm::{Booking, Call, Comm, Moved, Purpose};
use crate::optim::StateSlice;
use crate::zero::{Engine, UnitStates};
use crate::{Error, Result};

/// A tensor's bytes.
pub struct Bytes<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub bytes: Cow<'a, [u8]>,
}

impl View for &Bytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Named tensors.
pub type Named<'a> = Vec<(String, Bytes<'a>)>;

fn flat<'a>(dtype: Dtype, bytes: impl Into<Cow<'a, [u8]>>) -> Bytes<'a> {
    let bytes = bytes.into();
    Bytes {
        dtype,
        shape: vec![bytes.len() * 8 / dtype.bitsize()],
        bytes,
    }
}

/// The whole weights and the whole optimizer state, on rank 0; nothing on the others, which all
/// must call this.
///
/// # Errors
/// As every collective; [`Error::Tensor`] when weights are not at hand.
pub fn collect<'a>(engine: &'a mut Engine) -> Result<(Named<'a>, Named<'a>)> {
    let comm = engine.comm().clone();
    let (mut weights, mut optimizer) = (Named::new(), Named::new());
    for state in engine.states() {
        let is_sharded = state.master().is_some();
        if !is_sharded && comm.topology().rank > 0 {
            continue;
        }
        let shapes: HashMap<String, Vec<usize>> = (state.unit.buffer().layout().params.iter())
            .map(|param| (param.name.clone(), param.shape.clone()))
            .collect();
        let order: Vec<String> = (state.unit.buffer().layout().params.iter())
            .map(|param| param.name.clone())
            .collect();
        let (mut unit_weights, mut unit_optimizer) = (weights_of(state)?, optimizer_of(state));
        if is_sharded {
            unit_weights = put_together(&comm, unit_weights)?;
            unit_optimizer = put_together(&comm, unit_optimizer)?;
        }
        for (name, tensor) in &mut unit_weights {
            if let Some(shape) = shapes.get(name) {
                tensor.shape = shape.clone();
            }
        }
        let place = |name: &str| order.iter().position(|other| other == name);
        unit_weights.sort_by_key(|(name, _)| place(name));
        weights.extend(unit_weights);
        optimizer.extend(unit_optimizer);
    }
    Ok((weights, optimizer))
}

/// The rank's part of the weights of every parameter of a unit, flat.
fn weights_of(state: &UnitStates) -> Result<Named<'static>> {
    state.with_master(|master| {
        let part = |segment: &crate::optim::Segment| {
            let values = &master[segment.range.clone()];
            let bytes: &[u8] = bytemuck::cast_slice(values);
            (segment.name.clone(), flat(Dtype::F32, bytes.to_vec()))
        };
        state.optimizer.segments().iter().map(part).collect()
    })
}

/// The rank's part of the optimizer state of every parameter of a unit.
fn optimizer_of(state: &mut UnitStates) -> Named<'_> {
    let segments = state.optimizer.segments().iter();
    let names: Vec<String> = segments.map(|s| s.name.clone()).collect();
    let entries = state.optimizer.state().into_iter().map(|entry| {
        let tensor = match entry.values {
            StateSlice::F32(values) => flat(Dtype::F32, bytemuck::cast_slice::<f32, u8>(values)),
            StateSlice::U8(codes) => flat(Dtype::U8, &*codes),
        };
        (format!("{}/{}", names[entry.segment], entry.name), tensor)
    });
    entries.collect()
}

/// On rank 0, every rank's part of each tensor, one after the other: parameters lie in the flat
/// buffer in one piece, and ranks own it in rank order.
fn put_together(comm: &Comm, parts: Named) -> Result<Named<'static>> {
    let broken =
        |e: safetensors::SafeTensorError| Error::Peer(format!("a part of a checkpoint: {e}"));
    let views = parts.iter().map(|(name, tensor)| (name, tensor));
    let blob = safetensors::serialize(views, None).map_err(broken)?;
    let len = (blob.len() as u64).to_le_bytes().to_vec();
    let lens = comm.gather_bytes(Purpose::Checkpoint, len)?;
    let lens: Vec<usize> = (lens.as_chunks().0.iter())
        .map(|len| u64::from_le_bytes(*len) as usize)
        .collect();
    let booking = Booking::small(Purpose::Checkpoint, "gather");
    let is_lead = comm.topology().rank == 0;
    let sizes = lens.clone();
    let blobs = comm.run(booking, move |groups| {
        // An all-to-all in which only rank 0 receives.
        let mut send_bytes = vec![0; sizes.len()];
        send_bytes[0] = blob.len();
        let recv_bytes = if is_lead {
            sizes
        } else {
            vec![0; send_bytes.len()]
        };
        let mut received = vec![0; recv_bytes.iter().sum()];
        let world = &groups.world;
        world.all_to_all(&blob, &send_bytes, &mut received, &recv_bytes)?;
        let call = Call::AllToAll {
            recv_bytes: &recv_bytes,
        };
        Ok(Moved {
            value: received,
            elements: 0,
            bytes: world.volume(call),
        })
    })?;
    if !is_lead {
        return Ok(Named::new());
    }
    let mut whole: Named<'static> = Named::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut rest = &blobs[..];
    for len in lens {
        let (blob, next) = rest.split_at(len);
        rest = next;
        let mut tensors = SafeTensors::deserialize(blob).map_err(broken)?.tensors();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, part) in tensors {
            let place = *places.entry(name.clone()).or_insert_with(|| {
                whole.push((name, flat(part.dtype(), Vec::new())));
                whole.len() - 1
            });
            let tensor = &mut whole[place].1;
            tensor.bytes.to_mut().extend_from_slice(part.data());
            tensor.shape[0] += part.shape()[0];
        }
    }
    Ok(whole)
}
