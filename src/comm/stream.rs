//! The communication thread: runs collectives in order beside the computation.
//!
//! What a CUDA stream is to kernels, [`Comm`] is to collectives. A task owns its buffers while it
//! runs and gives them back through [`Pending::wait`], so nothing is borrowed across threads, and
//! no collective ever blocks a compute worker.

use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::watch::Lifeline;
use super::{Booking, Call, Group, Ledger, LinkBytes, Purpose, Solo, Topology, Totals, Traffic};
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

/// Time between two words about ranks that the others wait for.
const BETWEEN_WORDS: Duration = Duration::from_secs(30);

type Task = Box<dyn FnOnce(&Groups) + Send>;

/// A rank's groups, and the thread that runs collectives on them.
pub struct Comm {
    groups: Arc<Groups>,
    ledger: Arc<Mutex<Ledger>>,
    /// None for one rank, whose tasks only copy: they run where they are started.
    thread: Option<(Sender<Task>, JoinHandle<()>)>,
}

/// What a collective gives back.
#[derive(Debug)]
pub struct Moved<T> {
    /// Buffers and results.
    pub value: T,
    /// Elements of whole units, padding included.
    pub elements: usize,
    /// What this rank received.
    pub bytes: LinkBytes,
}

/// What a task returned, and how long it ran.
struct Done<T> {
    result: Result<Moved<T>>,
    busy: Duration,
}

/// A started task.
pub struct Pending<T> {
    done: Receiver<Done<T>>,
    booking: Booking,
    ledger: Arc<Mutex<Ledger>>,
}

impl<T> Pending<T> {
    /// Blocks until the task is done, and books it.
    ///
    /// # Errors
    /// The task's own.
    pub fn wait(self) -> Result<T> {
        let start = Instant::now();
        let gone = |_| candle_core::Error::Msg("the communication thread panicked".into());
        let Done { result, busy } = self.done.recv().map_err(gone)?;
        let moved = result?;
        let totals = Totals {
            calls: 1,
            elements: moved.elements as u64,
            moved: moved.bytes,
            busy,
            exposed: start.elapsed(),
        };
        let mut ledger = self.ledger.lock().expect("no holder panicked");
        ledger.book(self.booking, totals);
        Ok(moved.value)
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
            ledger: Arc::default(),
            thread: Some((tasks, thread)),
        })
    }

    /// One rank's, without a thread.
    pub fn solo() -> Self {
        Self {
            groups: Arc::new(Groups::solo()),
            ledger: Arc::default(),
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

    /// Queues `task` behind those started before it; waiting for it books it under `booking`. Every
    /// rank must start the same tasks in the same order.
    pub fn start<T: Send + 'static>(
        &self,
        booking: Booking,
        task: impl FnOnce(&Groups) -> Result<Moved<T>> + Send + 'static,
    ) -> Pending<T> {
        let (send, done) = sync_channel(1);
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
        Pending {
            done,
            booking,
            ledger: self.ledger.clone(),
        }
    }

    /// Runs `task` and waits for it.
    ///
    /// # Errors
    /// The task's own.
    pub fn run<T: Send + 'static>(
        &self,
        booking: Booking,
        task: impl FnOnce(&Groups) -> Result<Moved<T>> + Send + 'static,
    ) -> Result<T> {
        self.start(booking, task).wait()
    }

    /// Every rank's `bytes`, in rank order; all ranks give as many.
    ///
    /// # Errors
    /// As every collective.
    pub fn gather_bytes(&self, purpose: Purpose, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if self.topology().world() == 1 {
            return Ok(bytes);
        }
        self.run(Booking::small(purpose, "all_gather"), move |groups| {
            let mut all = vec![0; bytes.len() * groups.world.size()];
            groups.world.all_gather(&bytes, &mut all)?;
            let piece_bytes = bytes.len();
            Ok(Moved {
                value: all,
                elements: 0,
                bytes: groups.world.volume(Call::AllGather { piece_bytes }),
            })
        })
    }

    /// The sums over ranks, in rank order.
    ///
    /// # Errors
    /// As every collective.
    pub fn sum(&self, values: &[f64]) -> Result<Vec<f64>> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let all = self.gather_bytes(Purpose::Scalars, bytes)?;
        let all: Vec<f64> = all
            .as_chunks()
            .0
            .iter()
            .map(|b| f64::from_le_bytes(*b))
            .collect();
        let mut sums = vec![0.0; values.len()];
        for rank in all.chunks(values.len().max(1)) {
            for (sum, value) in sums.iter_mut().zip(rank) {
                *sum += value;
            }
        }
        Ok(sums)
    }

    /// Whether any rank says so.
    ///
    /// # Errors
    /// As every collective.
    pub fn any(&self, here: bool) -> Result<bool> {
        let all = self.gather_bytes(Purpose::Scalars, vec![u8::from(here)])?;
        Ok(all.contains(&1))
    }

    /// Rank 0's `bytes`; the others' say nothing.
    ///
    /// # Errors
    /// As every collective.
    pub fn from_lead(&self, purpose: Purpose, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if self.topology().world() == 1 {
            return Ok(bytes);
        }
        let broadcast = |bytes: Vec<u8>| {
            self.run(Booking::small(purpose, "broadcast"), move |groups| {
                let mut bytes = bytes;
                groups.world.broadcast(&mut bytes, 0)?;
                let call = Call::Broadcast {
                    bytes: bytes.len(),
                    root: 0,
                };
                Ok(Moved {
                    bytes: groups.world.volume(call),
                    elements: 0,
                    value: bytes,
                })
            })
        };
        let len = broadcast((bytes.len() as u64).to_le_bytes().to_vec())?;
        let len = len.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
        let bytes = match self.topology().rank {
            0 => bytes,
            _ => vec![0; len as usize],
        };
        broadcast(bytes)
    }

    /// Runs `work` where there is some, and returns once it is done on every rank, however long that
    /// takes: meanwhile the ranks show each other that they are alive. When one of them dies, the
    /// work at hand is finished first: what it leaves on the disk is whole.
    ///
    /// # Errors
    /// As every collective.
    pub fn patiently<T: Send>(&self, work: Option<impl FnOnce() -> T + Send>) -> Result<Option<T>> {
        if self.topology().world() == 1 {
            return Ok(work.map(|work| work()));
        }
        std::thread::scope(|scope| {
            let worker = work.map(|work| scope.spawn(work));
            let is_working = || worker.as_ref().is_some_and(|worker| !worker.is_finished());
            let mut next_word = Instant::now() + BETWEEN_WORDS;
            loop {
                let is_working = vec![u8::from(is_working())];
                let all = self.gather_bytes(Purpose::Scalars, is_working)?;
                let working: Vec<usize> = (0..all.len()).filter(|&r| all[r] == 1).collect();
                if working.is_empty() {
                    break;
                }
                if Instant::now() > next_word {
                    next_word += BETWEEN_WORDS;
                    if self.topology().rank == 0 {
                        tracing::warn!(
                            "all ranks wait for rank {working:?}, which prepares data or reads or \
                             writes a checkpoint"
                        );
                    }
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            match worker.map(|worker| worker.join()) {
                None => Ok(None),
                Some(Ok(value)) => Ok(Some(value)),
                Some(Err(panic)) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Runs `f` on rank 0 and gives what it returns to every rank; so are its errors, of the same
    /// kind, so that all ranks end alike.
    ///
    /// # Errors
    /// Those of `f`; as every collective.
    pub fn lead(&self, f: impl FnOnce() -> Result<Vec<u8>> + Send) -> Result<Vec<u8>> {
        let is_lead = self.topology().rank == 0;
        let mut message = Vec::new();
        let mut own_error = None;
        match self.patiently(is_lead.then_some(f))? {
            None => {}
            Some(Ok(value)) => {
                message.push(0);
                message.extend(value);
            }
            Some(Err(error)) => {
                message.push(error.exit_status());
                message.extend(error.message().into_bytes());
                own_error = Some(error);
            }
        }
        let message = self.from_lead(Purpose::Scalars, message)?;
        let result = match (own_error, message.split_first()) {
            (Some(error), _) => Err(error),
            (None, Some((0, value))) => Ok(value.to_vec()),
            (None, Some((status, text))) => {
                Err(Error::of_rank(0, *status, &String::from_utf8_lossy(text)))
            }
            (None, None) => Err(Error::Peer("rank 0 sent an empty message".into())),
        };
        result.map_err(|error| self.shared(error))
    }

    /// Every rank calls this with the result of its own work. One that failed fails all, with an
    /// error of the same kind, so that all ranks end alike.
    ///
    /// # Errors
    /// This rank's own, or that of the first rank that failed; as every collective.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        /// Of a message; the rank that failed says all of it.
        const LEN: usize = 1000;
        let mut own = vec![0; 1 + LEN];
        if let Err(error) = &result {
            let message = error.message();
            let message = &message.as_bytes()[..message.len().min(LEN)];
            own[0] = error.exit_status();
            own[1..=message.len()].copy_from_slice(message);
        }
        let all = self.gather_bytes(Purpose::Scalars, own)?;
        let others = all.chunks(1 + LEN).enumerate();
        let failed = others.map(|(rank, said)| (rank, said[0], &said[1..]));
        match (
            result,
            failed.into_iter().find(|(_, status, _)| *status != 0),
        ) {
            (Ok(value), None) => Ok(value),
            (Err(error), _) => Err(self.shared(error)),
            (Ok(_), Some((rank, status, message))) => {
                let message = String::from_utf8_lossy(message);
                let message = message.trim_end_matches('\0');
                Err(self.shared(Error::of_rank(rank, status, message)))
            }
        }
    }

    /// Gives `error` back, which every rank has, once every rank has it: the first that ends must
    /// not end the others with another.
    pub fn shared(&self, error: Error) -> Error {
        // What goes wrong here is later than the error.
        let _ = self.any(false);
        error
    }

    /// What was booked since the last call.
    pub fn take_step(&self) -> Traffic {
        self.ledger.lock().expect("no holder panicked").take_step()
    }

    /// Calls `f` with the books.
    pub fn with_ledger<R>(&self, f: impl FnOnce(&Ledger) -> R) -> R {
        f(&self.ledger.lock().expect("no holder panicked"))
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

    fn moved<T>(value: T) -> Result<Moved<T>> {
        Ok(Moved {
            value,
            elements: 3,
            bytes: LinkBytes::default(),
        })
    }

    #[test]
    fn tasks_run_in_order_and_give_their_buffers_back() {
        let comm = Comm::new(Groups::solo()).unwrap();
        let (send, receive) = channel();
        let booking = Booking::small(Purpose::ForwardGather, "all_gather");
        let pending: Vec<_> = (0..5)
            .map(|i| {
                let (send, buffer) = (send.clone(), vec![i; 3]);
                comm.start(booking.clone(), move |_| {
                    send.send(i).unwrap();
                    moved(buffer)
                })
            })
            .collect();
        for (i, pending) in pending.into_iter().enumerate() {
            assert_eq!(pending.wait().unwrap(), vec![i; 3]);
        }
        drop(send);
        assert_eq!(receive.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        let booked = comm.with_ledger(|ledger| ledger.run()[&booking]);
        assert_eq!((booked.calls, booked.elements), (5, 15));
    }

    #[test]
    fn an_error_reaches_the_waiter_and_later_tasks_still_run() {
        let comm = Comm::new(Groups::solo()).unwrap();
        let booking = || Booking::small(Purpose::Scalars, "all_gather");
        let failed = comm.start(booking(), |_| -> Result<Moved<()>> {
            Err(Error::Peer("rank 3 is gone".into()))
        });
        assert!(failed.wait().unwrap_err().to_string().contains("rank 3"));
        assert_eq!(comm.run(booking(), |_| moved(7)).unwrap(), 7);
        assert_eq!(comm.sum(&[2.0, 3.0]).unwrap(), [2.0, 3.0]);
        assert!(comm.any(true).unwrap() && !comm.any(false).unwrap());
        assert_eq!(
            comm.from_lead(Purpose::Scalars, vec![1, 2]).unwrap(),
            [1, 2]
        );
    }
}
