//! Which part of a unit's flat buffer a rank owns, and what lies in it.

use std::ops::Range;

use crate::ops::{ALIGN, UnitLayout};
use crate::optim::Segment;

/// Elements of every rank's shard of a buffer of `num_elements`: whole blocks of 2048, so that no
/// quantization block is ever cut by the number of ranks, and as many on every rank, so that
/// collectives have equal pieces. What the last ranks hold past the buffer's end is padding.
pub fn shard_len(num_elements: usize, world: usize) -> usize {
    num_elements.div_ceil(ALIGN).div_ceil(world) * ALIGN
}

/// The elements that `rank` of `world` owns.
pub fn shard(num_elements: usize, world: usize, rank: usize) -> Range<usize> {
    let len = shard_len(num_elements, world);
    rank * len..(rank + 1) * len
}

/// The parts of parameters that lie in `shard`, with ranges counted from its start.
///
/// Whether state may be quantized is decided on the whole parameter: never on what a rank holds.
pub fn segments(layout: &UnitLayout, shard: &Range<usize>, min_8bit_size: usize) -> Vec<Segment> {
    let params = layout.params.iter().zip(&layout.offsets);
    let mut segments: Vec<Segment> = params
        .filter_map(|(param, &offset)| {
            let start = offset.max(shard.start);
            let end = (offset + param.len()).min(shard.end);
            (start < end).then(|| Segment {
                range: start - shard.start..end - shard.start,
                offset: start - offset,
                name: param.name.clone(),
                decay: param.decay,
                eight_bit: !param.is_plain()
                    && !param.keep_f32_state
                    && param.len() >= min_8bit_size,
            })
        })
        .collect();
    segments.sort_by_key(|segment| segment.range.start);
    segments
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ops::{ParamInit, ParamSpec};
    use proptest::prelude::*;

    /// A unit of flat parameters of these lengths.
    pub fn layout(lens: &[usize]) -> UnitLayout {
        let spec = |(i, &len): (usize, &usize)| ParamSpec {
            name: format!("p{i}"),
            shape: vec![len],
            init: ParamInit::Constant(0.0),
            decay: true,
            keep_f32_state: i % 3 == 2,
        };
        UnitLayout::new(lens.iter().enumerate().map(spec).collect())
    }

    #[test]
    fn gpt2s_table_on_16_ranks_loses_no_row() {
        let layout = layout(&[50_257 * 768, 1024 * 768]);
        let len: usize = (0..16)
            .map(|rank| shard(layout.num_elements, 16, rank))
            .flat_map(|shard| segments(&layout, &shard, 4096))
            .map(|segment| segment.range.len())
            .sum();
        assert_eq!(len, layout.num_params());
    }

    proptest! {
        #[test]
        fn shards_cover_every_element_once(
            lens in prop::collection::vec(1usize..30_000, 1..8),
            world in 1usize..20,
        ) {
            let layout = layout(&lens);
            let mut end = 0;
            let mut covered = vec![0; lens.len()];
            for rank in 0..world {
                let shard = shard(layout.num_elements, world, rank);
                prop_assert_eq!(shard.start, end);
                prop_assert_eq!(shard.start % ALIGN, 0);
                prop_assert_eq!(shard.len(), shard_len(layout.num_elements, world));
                end = shard.end;
                for segment in segments(&layout, &shard, 4096) {
                    let i: usize = segment.name[1..].parse().unwrap();
                    prop_assert_eq!(segment.offset, covered[i]);
                    covered[i] += segment.range.len();
                    prop_assert!(!segment.eight_bit || segment.range.start % ALIGN == 0);
                    prop_assert_eq!(segment.eight_bit, lens[i] >= 4096 && i % 3 != 2);
                }
            }
            prop_assert!(end >= layout.num_elements);
            prop_assert!(end < layout.num_elements + world * ALIGN);
            prop_assert_eq!(covered, lens);
        }
    }
}
