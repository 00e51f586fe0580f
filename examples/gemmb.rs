use std::time::Instant;
use train::ops::{gemm,Mat,MatMut};
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn main(){
 train::runtime::keep_freed_memory();
 train::runtime::start_workers(2).unwrap();
 for (m,n,k) in [(2048,2048,2048),(2048,768,256),(2048,256,256),(2048,1024,256),(2048,256,1024),(1024,4096,256),(768,128,128),(768,384,128),(768,512,128),(768,128,512)]{
  let a=vec![0.5f32;m*k];let b=vec![0.25f32;k*n];let mut c=vec![0f32;m*n];
  let mut out=vec![];
  for th in [1,2]{ for (name,t) in [("nn",0),("nt",1),("tn",2)]{
   let reps=((1e9/(m*n*k) as f64).max(1.0)) as usize; let mut best=1e9f64;
   for _ in 0..4{let t0=Instant::now();for _ in 0..reps{
     let am=if t==2 {Mat::new(&a,k,m,m).t()} else {Mat::new(&a,m,k,k)};
     let bm=if t==1 {Mat::new(&b,n,k,k).t()} else {Mat::new(&b,k,n,n)};
     gemm(MatMut::new(&mut c,m,n,n),am,bm,t==2,th);}
     best=best.min(t0.elapsed().as_secs_f64()/reps as f64);}
   out.push(format!("{name}{th} {:.0}",2.0*(m*n*k) as f64/best/1e9));
  }}
  println!("{m}x{n}x{k}: {}",out.join("  "));
 }
}
