//! Optimizer state of a shard, f32 or 8-bit, and the walk over it that all optimizers share.
//!
//! Each moment of the whole shard is one flat allocation a kind (f32, codes, scales). Segments are
//! cut into pieces of whole blocks; tasks take runs of pieces, so many small segments share a task
//! and a large one spreads over all threads. A piece's result depends on the piece alone.

use std::ops::Range;

use super::{Segment, StateEntry, StateSlice};

/// Blocks divide this, and pieces of a segment start on its multiples.
pub(crate) const ALIGNMENT: usize = crate::ops::ALIGN;

/// Values of a piece at most, and of a task about.
const PIECE_VALUES: usize = 64 * 1024;

/// A run of one segment.
#[derive(Debug)]
struct Piece {
    /// Where it lies in the shard.
    range: Range<usize>,
    /// Index of its segment.
    segment: usize,
    /// Whether its state is 8-bit.
    eight_bit: bool,
    /// Where its state starts.
    at: Offsets,
}

/// A place in the flat allocations of a moment.
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    f32s: usize,
    codes: usize,
    scales: usize,
}

/// One moment of the whole shard.
struct Moment {
    name: &'static str,
    absmax_name: &'static str,
    f32s: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

/// What to call a moment, and the code its 8-bit state starts with: that of 0.
pub(crate) struct MomentSpec {
    /// Name of the f32 values or the codes.
    pub name: &'static str,
    /// Name of the scales.
    pub absmax_name: &'static str,
    /// Code of 0 in its map.
    pub zero_code: u8,
}

/// `K` moments a parameter.
pub(crate) struct State<const K: usize> {
    segments: Vec<Segment>,
    pieces: Vec<Piece>,
    moments: [Moment; K],
    shard_len: usize,
    block: usize,
}

/// One moment of a piece.
pub(crate) enum PieceState<'a> {
    /// As long as the piece.
    F32(&'a mut [f32]),
    /// Codes as long as the piece; a scale a block.
    EightBit {
        codes: &'a mut [u8],
        scales: &'a mut [f32],
    },
}

impl<const K: usize> State<K> {
    /// The runs of the shard.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Zero state for `segments`, of which those that may be `eight_bit` are.
    pub(crate) fn new(
        segments: Vec<Segment>,
        shard_len: usize,
        block: usize,
        specs: [MomentSpec; K],
    ) -> Self {
        assert!(
            block >= 64 && ALIGNMENT.is_multiple_of(block),
            "block {block} is not a divisor of {ALIGNMENT} from 64"
        );
        let (mut pieces, mut at, mut end) = (Vec::new(), Offsets::default(), 0);
        for (index, segment) in segments.iter().enumerate() {
            let Range { start, end: stop } = segment.range;
            assert!(end <= start && start <= stop && stop <= shard_len);
            assert!(!segment.eight_bit || start.is_multiple_of(ALIGNMENT));
            end = stop;
            for start in (start..stop).step_by(PIECE_VALUES) {
                let range = start..stop.min(start + PIECE_VALUES);
                let len = range.len();
                pieces.push(Piece {
                    range,
                    segment: index,
                    eight_bit: segment.eight_bit,
                    at,
                });
                if segment.eight_bit {
                    at.codes += len;
                    at.scales += len.div_ceil(block);
                } else {
                    at.f32s += len;
                }
            }
        }
        let moments = specs.map(|spec| Moment {
            name: spec.name,
            absmax_name: spec.absmax_name,
            f32s: vec![0.0; at.f32s],
            codes: vec![spec.zero_code; at.codes],
            scales: vec![0.0; at.scales],
        });
        State {
            segments,
            pieces,
            moments,
            shard_len,
            block,
        }
    }

    /// Bytes of state.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |m: &Moment| 4 * m.f32s.len() + m.codes.len() + 4 * m.scales.len();
        self.moments.iter().map(bytes).sum()
    }

    /// The state of every segment, in order; see [`StateEntry`].
    pub(crate) fn entries(&mut self) -> Vec<StateEntry<'_>> {
        let mut rest = self.moments.each_mut().map(|m| {
            let views = (&mut m.f32s[..], &mut m.codes[..], &mut m.scales[..]);
            (m.name, m.absmax_name, views)
        });
        let mut entries = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            let len = segment.range.len();
            for (name, absmax_name, (f32s, codes, scales)) in &mut rest {
                let mut push = |name, block, values| {
                    entries.push(StateEntry {
                        segment: index,
                        name,
                        block,
                        values,
                    });
                };
                if segment.eight_bit {
                    push(*name, 1, StateSlice::U8(take(codes, len)));
                    let scales = take(scales, len.div_ceil(self.block));
                    push(*absmax_name, self.block, StateSlice::F32(scales));
                } else {
                    push(*name, 1, StateSlice::F32(take(f32s, len)));
                }
            }
        }
        entries
    }

    /// Calls `update` for every piece with its segment, parameters, gradients and moments, on all threads
    /// of the current pool. Allocates nothing.
    pub(crate) fn for_each_piece(
        &mut self,
        params: &mut [f32],
        grads: &[f32],
        update: impl Fn(&Segment, &mut [f32], &[f32], [PieceState; K]) + Sync,
    ) {
        assert_eq!(params.len(), self.shard_len);
        assert_eq!(grads.len(), self.shard_len);
        let run = Run {
            params,
            grads,
            start: 0,
            at: Offsets::default(),
            moments: self
                .moments
                .each_mut()
                .map(|m| (&mut m.f32s[..], &mut m.codes[..], &mut m.scales[..])),
        };
        run.walk(&self.pieces, &self.segments, self.block, &update);
    }
}

/// Splits `len` values off the front of `rest`.
fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    rest.split_off_mut(..len)
        .expect("state covers its segments")
}

/// The values and state of consecutive pieces, from shard position `start` and state offset `at`.
struct Run<'a, const K: usize> {
    params: &'a mut [f32],
    grads: &'a [f32],
    start: usize,
    at: Offsets,
    moments: [MomentSlices<'a>; K],
}

/// A moment's f32 values, codes and scales.
type MomentSlices<'a> = (&'a mut [f32], &'a mut [u8], &'a mut [f32]);

impl<const K: usize> Run<'_, K> {
    fn walk<F>(mut self, pieces: &[Piece], segments: &[Segment], block: usize, update: &F)
    where
        F: Fn(&Segment, &mut [f32], &[f32], [PieceState; K]) + Sync,
    {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return;
        };
        let (start, end) = (first.range.start, last.range.end);
        if pieces.len() > 1 && end - start > PIECE_VALUES {
            let middle = start + (end - start) / 2;
            let split = pieces.partition_point(|p| p.range.start < middle);
            let (left, right) = pieces.split_at(split.clamp(1, pieces.len() - 1));
            let (left_run, right_run) = self.split(&right[0]);
            rayon::join(
                || left_run.walk(left, segments, block, update),
                || right_run.walk(right, segments, block, update),
            );
            return;
        }
        for piece in pieces {
            let len = piece.range.len();
            let place = piece.range.start - self.start;
            let (f32_at, code_at, scale_at) = (
                piece.at.f32s - self.at.f32s,
                piece.at.codes - self.at.codes,
                piece.at.scales - self.at.scales,
            );
            let moments = self.moments.each_mut().map(|(f32s, codes, scales)| {
                if piece.eight_bit {
                    PieceState::EightBit {
                        codes: &mut codes[code_at..][..len],
                        scales: &mut scales[scale_at..][..len.div_ceil(block)],
                    }
                } else {
                    PieceState::F32(&mut f32s[f32_at..][..len])
                }
            });
            let params = &mut self.params[place..place + len];
            update(
                &segments[piece.segment],
                params,
                &self.grads[place..place + len],
                moments,
            );
        }
    }

    /// Cuts before `piece`.
    fn split(&mut self, piece: &Piece) -> (Run<'_, K>, Run<'_, K>) {
        let place = piece.range.start - self.start;
        let (f32_at, code_at, scale_at) = (
            piece.at.f32s - self.at.f32s,
            piece.at.codes - self.at.codes,
            piece.at.scales - self.at.scales,
        );
        let (left_params, right_params) = self.params.split_at_mut(place);
        let (left_grads, right_grads) = self.grads.split_at(place);
        let mut moments = self.moments.each_mut().map(|(f32s, codes, scales)| {
            let (left_f32s, right_f32s) = f32s.split_at_mut(f32_at);
            let (left_codes, right_codes) = codes.split_at_mut(code_at);
            let (left_scales, right_scales) = scales.split_at_mut(scale_at);
            let left: MomentSlices = (left_f32s, left_codes, left_scales);
            let right: MomentSlices = (right_f32s, right_codes, right_scales);
            (left, right)
        });
        let left = Run {
            params: left_params,
            grads: left_grads,
            start: self.start,
            at: self.at,
            moments: moments.each_mut().map(|(left, _)| std::mem::take(left)),
        };
        let right = Run {
            params: right_params,
            grads: right_grads,
            start: piece.range.start,
            at: piece.at,
            moments: moments.each_mut().map(|(_, right)| std::mem::take(right)),
        };
        (left, right)
    }
}
