//! stub replaced at merge
#[derive(Clone, Copy)]
pub enum Purpose {
    Init = 1,
    Sample = 2,
    Dropout = 3,
    Text = 4,
    Rounding = 5,
}
#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
    z ^ (z >> 31)
}
#[inline(always)]
pub fn hash(seed: u64, purpose: Purpose, index: u64) -> u64 {
    mix(mix(seed ^ ((purpose as u64) << 56)).wrapping_add(index.wrapping_mul(0x9e3779b97f4a7c15)))
}
pub fn uniform(seed: u64, purpose: Purpose, index: u64) -> f32 {
    (hash(seed, purpose, index) >> 40) as f32 / (1u64 << 24) as f32
}
pub fn normal(seed: u64, purpose: Purpose, index: u64) -> f32 {
    let h = hash(seed, purpose, index);
    let u = ((h >> 32) as f64 + 0.5) / 4294967296.0;
    let v = (h & 0xffffffff) as f64 / 4294967296.0;
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}
