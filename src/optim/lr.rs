//! `[lr]`: the learning rate as a pure function of the step.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Shape of the schedule after warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to `min`.
    Linear,
    /// Falls along half a cosine to `min`.
    Cosine,
    /// Warmup, stable, decay: stays at the peak, then falls in a straight line to `min`.
    Wsd,
}

/// The learning-rate schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LrConfig {
    /// Highest learning rate.
    pub peak: f32,
    /// Learning rate at the end of the decay.
    pub min: f32,
    /// Steps of linear warmup from 0 to `peak`.
    pub warmup_steps: u64,
    /// Shape after warmup.
    pub schedule: Schedule,
    /// Step at which the decay ends; the end of the run when absent.
    pub decay_end: Option<u64>,
    /// Steps of the final decay of "wsd"; a fifth of the run when absent.
    pub decay_steps: Option<u64>,
}

impl Default for LrConfig {
    fn default() -> Self {
        Self {
            peak: 1e-3,
            min: 1e-4,
            warmup_steps: 100,
            schedule: Schedule::Cosine,
            decay_end: None,
            decay_steps: None,
        }
    }
}

impl LrConfig {
    /// The step at which decay starts and the one at which it ends, for a run of `num_steps`.
    pub fn decay_range(&self, num_steps: u64) -> (u64, u64) {
        let end = self.decay_end.unwrap_or(num_steps);
        let start = match self.schedule {
            Schedule::Wsd => end.saturating_sub(self.decay_steps.unwrap_or(num_steps / 5)),
            _ => self.warmup_steps,
        };
        (start, end)
    }

    /// The learning rate of `step` (0 is the first) in a run of `num_steps`.
    ///
    /// Warmup ends at `peak` exactly: step `warmup_steps` is the first at the peak. As in nanoGPT,
    /// step 0 already moves: it uses `peak / (warmup_steps + 1)`.
    pub fn at(&self, step: u64, num_steps: u64) -> f32 {
        let (peak, min) = (self.peak as f64, self.min as f64);
        if step < self.warmup_steps {
            return (peak * (step + 1) as f64 / (self.warmup_steps + 1) as f64) as f32;
        }
        if self.schedule == Schedule::Constant {
            return self.peak;
        }
        let (start, end) = self.decay_range(num_steps);
        let done = if step <= start {
            0.0
        } else if step >= end {
            1.0
        } else {
            (step - start) as f64 / (end - start) as f64
        };
        let left = match self.schedule {
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            _ => 1.0 - done,
        };
        (min + left * (peak - min)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_hit_their_corners() {
        let mut lr = LrConfig {
            peak: 1.0,
            min: 0.1,
            warmup_steps: 9,
            ..Default::default()
        };
        for schedule in [Schedule::Linear, Schedule::Cosine, Schedule::Wsd] {
            lr.schedule = schedule;
            assert!((lr.at(0, 109) - 0.1).abs() < 1e-6);
            assert_eq!(lr.at(9, 109), 1.0);
            assert!((lr.at(109, 109) - 0.1).abs() < 1e-6);
            assert!((lr.at(500, 109) - 0.1).abs() < 1e-6);
            let rates: Vec<f32> = (9..109).map(|s| lr.at(s, 109)).collect();
            assert!(rates.windows(2).all(|w| w[1] <= w[0]), "{schedule:?}");
        }
        lr.schedule = Schedule::Linear;
        assert!((lr.at(59, 109) - 0.55).abs() < 1e-6);
        lr.schedule = Schedule::Wsd;
        lr.decay_steps = Some(10);
        assert_eq!(lr.at(99, 109), 1.0);
        assert!((lr.at(104, 109) - 0.55).abs() < 1e-6);
        lr.schedule = Schedule::Constant;
        assert_eq!(lr.at(5000, 109), 1.0);
    }
}
