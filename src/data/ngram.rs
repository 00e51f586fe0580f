//! Unigram and bigram cross-entropy: the baselines a model has to beat.
//!
//! Counts come from the training tokens, the score from the validation tokens, in nats a token.
//! Unigram: add-one smoothing over the vocabulary, p(w) = (c(w) + 1) / (N + V). Bigram: Witten-Bell
//! interpolation (Witten and Bell 1991), p(w | h) = (c(h, w) + T(h) p(w)) / (c(h) + T(h)) with T(h)
//! the number of different tokens seen after h. (Add-one smoothing of bigrams would give most of
//! the mass of a large vocabulary to pairs that never occur.)

use std::collections::HashMap;

/// Mean cross-entropy of `val[1..]` under (unigram, bigram) counts of `train`; both score the
/// same tokens, since the first has no context. `None` where there is nothing to score. Memory grows
/// with the number of different pairs.
pub fn cross_entropy(train: &[u32], val: &[u32], vocab_size: usize) -> Option<(f64, f64)> {
    if val.len() < 2 {
        return None;
    }
    let mut unigrams = vec![0u64; vocab_size];
    for &token in train {
        unigrams[token as usize] += 1;
    }
    let mut pairs: HashMap<(u32, u32), u32> = HashMap::new();
    let mut histories = vec![0u64; vocab_size]; // c(h): pairs that start with h
    let mut followers = vec![0u64; vocab_size]; // T(h)
    for pair in train.windows(2) {
        let count = pairs.entry((pair[0], pair[1])).or_insert(0);
        followers[pair[0] as usize] += u64::from(*count == 0);
        histories[pair[0] as usize] += 1;
        *count = count.saturating_add(1);
    }
    let mut sums = (0.0, 0.0);
    for pair in val.windows(2) {
        let (h, w) = (pair[0] as usize, pair[1] as usize);
        let unigram = (unigrams[w] + 1) as f64 / (train.len() + vocab_size) as f64;
        let bigram = if histories[h] == 0 {
            unigram
        } else {
            let seen = pairs.get(&(pair[0], pair[1])).copied().unwrap_or(0) as f64;
            (seen + followers[h] as f64 * unigram) / (histories[h] + followers[h]) as f64
        };
        sums.0 -= unigram.ln();
        sums.1 -= bigram.ln();
    }
    let scored = (val.len() - 1) as f64;
    Some((sums.0 / scored, sums.1 / scored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_case_matches_the_formulas_by_hand() {
        // train 0 1 0 1 0 2: c = 3 2 1, N = 6, V = 4, followers T(0) = 2, c(0) = 3.
        let (unigram, bigram) = cross_entropy(&[0, 1, 0, 1, 0, 2], &[3, 0, 1, 3], 4).unwrap();
        let p = |c: f64| (c + 1.0) / 10.0;
        let want_unigram = -(p(3.0).ln() + p(2.0).ln() + p(0.0).ln()) / 3.0;
        // 3 was never a history, so 0 after 3 falls back; 1 after 0; 3 after 1 (T(1) = 1, c(1) = 2).
        let after_0: f64 = (2.0 + 2.0 * p(2.0)) / (3.0 + 2.0);
        let after_1: f64 = (0.0 + 1.0 * p(0.0)) / (2.0 + 1.0);
        let want_bigram = -(p(3.0).ln() + after_0.ln() + after_1.ln()) / 3.0;
        assert!((unigram - want_unigram).abs() < 1e-12);
        assert!((bigram - want_bigram).abs() < 1e-12);
    }

    #[test]
    fn bigram_probabilities_of_every_history_sum_to_one() {
        let train = [0u32, 1, 2, 2, 1, 0, 3, 2, 2, 2, 0];
        for h in 0..5u32 {
            let total: f64 = (0..5)
                .map(|w| (-cross_entropy(&train, &[h, w], 5).unwrap().1).exp())
                .sum();
            assert!((total - 1.0).abs() < 1e-12, "history {h}: {total}");
        }
    }

    #[test]
    fn nothing_to_score_is_none() {
        assert_eq!(cross_entropy(&[0, 1], &[1], 2), None);
    }
}
