//! The communication thread: runs collectives in order beside the computation.
//!
//! What a CUDA stream is to kernels, [`Comm`] is to collectives. A task owns its buffers while it
//! runs and gives them back through [`Pending::wait`], so nothing is borrowed across threads, and
//! no collective ever blocks a compute worker.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::watch::Lifeline;
use super::{Group, LinkBytes, ReduceOp, Solo, Topology};
use crate::{Error, Result};

/// The groups a rank belongs to.
pub struct Groups {
    /// Says goodbye to the other ranks when the groups are dropped: before their connections close.
    pub(super) lifeline: Lifeline,
    /// This rank's place.
    pub topology: Topology,
    /// All ranks.
    pub world: Arc<dyn Group>,
    /// The ranks of this node.
    pub local: Arc<dyn Group>,
    /// The ranks with this local rank, one a node.
    pub cross: Arc<dyn Group>,
}

impl Groups {
    /// The groups of one rank.
    pub fn solo() -> Self {
        Self {
            topology: Topology::SOLO,
            world: Arc::new(Solo),
            local: Arc::new(Solo),
            cross: Arc::new(Solo),
            lifeline: Lifeline::default(),
        }
    }

    /// Ends the job on every rank: what they are in fails with "rank r stopped: reason", as does
    /// everything later. To be called before a rank that hit an error drops its groups, which
    /// would look like an orderly end.
    pub fn abort(&self, reason: &str) {
        self.lifeline.abort(reason);
    }

    /// What this rank has received over all its groups, each byte once: a group on its own counts
    /// what was called on it.
    pub fn received(&self) -> LinkBytes {
        let mut seen: Vec<&Arc<dyn Group>> = Vec::new();
        let mut total = LinkBytes::default();
        for group in [&self.world, &self.local, &self.cross] {
            if !seen.iter().any(|other| Arc::ptr_eq(other, group)) {
                total += group.received();
                seen.push(group);
            }
        }
        total
    }
}

type Task = Box<dyn FnOnce(&Groups) + Send>;

/// A rank's groups, and the thread that runs collectives on them.
pub struct Comm {
    groups: Arc<Groups>,
    /// None for one rank, whose tasks only copy: they run where they are started.
    thread: Option<(Sender<Task>, JoinHandle<()>)>,
}

/// What a task returned, and how long it ran.
struct Done<T> {
    result: Result<T>,
    busy: Duration,
}

/// A started task.
pub struct Pending<T>(Receiver<Done<T>>);

/// The end of a task, seen from the computation.
#[derive(Debug)]
pub struct Finished<T> {
    /// What the task returned.
    pub value: T,
    /// How long it ran.
    pub busy: Duration,
    /// How long the computation waited for it.
    pub exposed: Duration,
}

impl<T> Pending<T> {
    /// Blocks until the task is done.
    ///
    /// # Errors
    /// The task's own.
    pub fn wait(self) -> Result<Finished<T>> {
        let start = Instant::now();
        let gone = || Error::Peer("the communication thread ended early".into());
        let done = self.0.recv().map_err(|_| gone())?;
        Ok(Finished {
            value: done.result?,
            busy: done.busy,
            exposed: start.elapsed(),
        })
    }
}

impl Comm {
    /// Starts the communication thread over `groups`.
    ///
    /// # Errors
    /// [`Error::Config`] when the system refuses a thread.
    pub fn new(groups: Groups) -> Result<Self> {
        let groups = Arc::new(groups);
        let (tasks, inbox) = channel::<Task>();
        let shared = groups.clone();
        let thread = std::thread::Builder::new()
            .name("comm".into())
            .spawn(move || {
                crate::runtime::flush_denormals();
                for task in inbox {
                    task(&shared);
                }
            })
            .map_err(|e| Error::Config(format!("cannot start the communication thread: {e}")))?;
        Ok(Self {
            groups,
            thread: Some((tasks, thread)),
        })
    }

    /// One rank's, without a thread.
    pub fn solo() -> Self {
        Self {
            groups: Arc::new(Groups::solo()),
            thread: None,
        }
    }

    /// This rank's place.
    pub fn topology(&self) -> Topology {
        self.groups.topology
    }

    /// The groups, for sizes and counters; collectives go through [`Comm::start`].
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// [`Groups::abort`], also while a collective runs.
    pub fn abort(&self, reason: &str) {
        self.groups.abort(reason);
    }

    /// Queues `task` behind those started before it. Every rank must start the same tasks in the
    /// same order.
    pub fn start<T: Send + 'static>(
        &self,
        task: impl FnOnce(&Groups) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (send, receive) = sync_channel(1);
        let task: Task = Box::new(move |groups| {
            let start = Instant::now();
            let result = task(groups);
            // Nobody waits when the computation has failed already.
            let _ = send.send(Done {
                result,
                busy: start.elapsed(),
            });
        });
        match &self.thread {
            // A thread that is gone drops the task and with it `send`: `wait` says so.
            Some((tasks, _)) => drop(tasks.send(task)),
            None => task(&self.groups),
        }
        Pending(receive)
    }

    /// Runs `task` and waits for it.
    ///
    /// # Errors
    /// The task's own.
    pub fn run<T: Send + 'static>(
        &self,
        task: impl FnOnce(&Groups) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        Ok(self.start(task).wait()?.value)
    }

    /// Combines a few numbers over all ranks.
    ///
    /// # Errors
    /// As every collective.
    pub fn all_reduce(&self, values: &[f32], op: ReduceOp) -> Result<Vec<f32>> {
        let mut values = values.to_vec();
        if self.topology().world() == 1 {
            return Ok(values);
        }
        self.run(move |groups| {
            groups.world.all_reduce(&mut values, op)?;
            Ok(values)
        })
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if let Some((tasks, thread)) = self.thread.take() {
            if std::thread::panicking() {
                // Or the thread would wait for ranks that wait for this one.
                self.groups.abort("it panicked");
            }
            drop(tasks);
            // A panic there was already reported by the panic hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_run_in_order_and_give_their_buffers_back() {
        let comm = Comm::new(Groups::solo()).unwrap();
        let (send, receive) = channel();
        let pending: Vec<_> = (0..5)
            .map(|i| {
                let (send, buffer) = (send.clone(), vec![i; 3]);
                comm.start(move |_| {
                    send.send(i).unwrap();
                    Ok(buffer)
                })
            })
            .collect();
        for (i, pending) in pending.into_iter().enumerate() {
            assert_eq!(pending.wait().unwrap().value, vec![i; 3]);
        }
        drop(send);
        assert_eq!(receive.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn an_error_reaches_the_waiter_and_later_tasks_still_run() {
        let comm = Comm::new(Groups::solo()).unwrap();
        let failed = comm.start(|_| -> Result<()> { Err(Error::Peer("rank 3 is gone".into())) });
        assert!(failed.wait().unwrap_err().to_string().contains("rank 3"));
        assert_eq!(comm.run(|_| Ok(7)).unwrap(), 7);
        assert_eq!(comm.all_reduce(&[2.0], ReduceOp::Max).unwrap(), [2.0]);
    }
}
