//! Instruction sets, chosen at run time, and the two ways kernels are written for them.
//!
//! Most kernels are a plain loop that the compiler vectorises for each set (`body`); those that
//! work in registers on packed codes spell the instructions out (`lanes`). Either way there is
//! one generic body, the best set this CPU has is picked at run time, and tests run every set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub mod body; // plain loops, vectorised by the compiler
pub(crate) mod lanes; // explicit vectors

use std::sync::OnceLock;

/// An instruction set that kernels have a path for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: the readable twin of every kernel.
    Portable,
    /// AVX2 and FMA, 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, 16 lanes.
    Avx512,
}

impl Isa {
    /// Every instruction set that this CPU runs, slowest first.
    pub fn supported() -> Vec<Isa> {
        let mut isas = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2 {
                isas.push(Isa::Avx2);
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                isas.push(Isa::Avx512);
            }
        }
        isas
    }

    /// The fastest instruction set of this CPU.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::supported().pop().unwrap_or(Isa::Portable))
    }

    /// This set, or the best one of this CPU if that is less. Kernels dispatch on it, so that no
    /// value of this type can lead to an instruction the CPU does not have.
    pub fn within_cpu(self) -> Isa {
        self.min(Isa::best())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_the_last_supported() {
        assert_eq!(Isa::supported().first(), Some(&Isa::Portable));
        assert_eq!(Isa::supported().last(), Some(&Isa::best()));
    }
}
