//! Dumps, restores and clones of real programs with the real CRIU. Without one
//! (`STRATA_CRIU`, PATH, or what `scripts/setup.sh criu` fetches) they say that
//! they are skipped.
#![forbid(unsafe_code)]

mod pager;
mod program;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, fs};

use pager::{Memory, Pager};
use program::Program;
use strata_snapshot::{
    Criu, Dump, DumpError, DumpOptions, Restore, RestoreError, RestoreOptions, RestoredTree, Shown,
    process_tree,
};
use strata_sys::{Running, SIGCONT, SIGKILL, SIGSTOP};

/// One at a time: they restore processes under their old numbers.
static ONE: Mutex<()> = Mutex::new(());

fn criu() -> Option<Criu> {
    let named = env::var_os("STRATA_CRIU").filter(|path| !path.is_empty()).map(PathBuf::from);
    let fetched = || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/criu.sh");
        let output = Command::new(script).arg("--path").output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| PathBuf::from(path.trim()))
    };
    let found = Criu::find(named.or_else(fetched).as_deref());
    if let Err(error) = &found {
        eprintln!("skipped: {error}");
    }
    found.ok()
}

/// A test's directory, removed with it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("strata-criu-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Dumps the program; its memory as it was while it stood still.
fn dump(criu: &Criu, program: &Program, images: &std::path::Path) -> Memory {
    dump_with(criu, program, images, &DumpOptions::default())
}

fn dump_with(
    criu: &Criu,
    program: &Program,
    images: &std::path::Path,
    options: &DumpOptions,
) -> Memory {
    let frozen = Dump::begin(criu, program.pid(), images, options).expect("frozen");
    let memory = Memory::of(&process_tree(program.pid()));
    let outcome = frozen.thaw().expect("a whole dump");
    assert!(outcome.frozen >= outcome.criu);
    memory
}

fn restore(
    criu: &Criu,
    place: &Place,
    work: &str,
    memory: &Memory,
    options: RestoreOptions,
) -> Result<(RestoredTree, Vec<Pager>), RestoreError> {
    let mut restore = Restore::begin(criu, &place.join("images"), &place.join(work), options)?;
    let mut pagers = Vec::new();
    while let Some(arrival) = restore.next_arrival()? {
        pagers.push(Pager::serve(arrival.userfaultfd, memory.pages_of(arrival.old_pid)));
    }
    Ok((restore.finish()?, pagers))
}

/// A clone's keeper; the clone ends with the test.
struct Kept(Running);

impl Kept {
    fn of(tree: &mut RestoredTree) -> Self {
        Self(tree.keeper.take().expect("a keeper"))
    }

    fn end(&mut self) {
        self.0.kill();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.end();
    }
}

/// A directory of its own with the same plain files.
fn copy_files(from: &std::path::Path, to: &std::path::Path) -> PathBuf {
    fs::create_dir(to).expect("a copy");
    for entry in fs::read_dir(from).expect("a directory").flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
        }
    }
    to.to_owned()
}

fn plain() -> RestoreOptions {
    RestoreOptions::new(env!("CARGO_BIN_EXE_strata-clone").into())
}

fn own_numbers() -> RestoreOptions {
    RestoreOptions { own_pids: true, ..plain() }
}

#[test]
fn a_tree_is_dumped_runs_on_and_comes_back_after_its_death() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("tree");
    let mut program = Program::start(&place.0);
    assert_eq!(program.ask("add"), "1 1");
    let outside = program.connect();
    let memory = dump(&criu, &program, &place.join("images"));
    assert_eq!(program.ask_on(&outside, "add"), "2 2", "it runs on, its client too");
    program.kill();
    let (tree, pagers) = restore(&criu, &place, "work", &memory, plain()).expect("restored");
    assert_eq!(tree.root, program.pid());
    assert_eq!(pagers.len(), 2, "the program and its child");
    assert_eq!(program.ask("add"), "2 2", "as at the dump: parent's and child's count");
    assert_eq!(program.ask("sum"), program.sum(), "its memory");
    assert_eq!(program.ask("closed"), "1", "the connection to us has ended for it");
    program.adopt(tree.root);
}

#[test]
fn memory_that_criu_is_not_shown_comes_back_too() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("hidden");
    let mut program = Program::start(&place.0);
    dump(&criu, &program, &place.join("images"));
    let shown = pagemap_bytes(&place.join("images"));
    fs::remove_dir_all(place.join("images")).expect("removed");
    let options = DumpOptions { hide_memory: true, ..DumpOptions::default() };
    let memory = dump_with(&criu, &program, &place.join("images"), &options);
    assert!(pagemap_bytes(&place.join("images")) < shown, "ranges are missing in the images");
    program.kill();
    let (tree, _pagers) = restore(&criu, &place, "work", &memory, plain()).expect("restored");
    assert_eq!(program.ask("add"), "1 1");
    assert_eq!(program.ask("sum"), program.sum());
    program.adopt(tree.root);
}

#[test]
fn what_was_stopped_at_the_dump_stays_so_and_nothing_else() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("stopped");
    let mut program = Program::start(&place.0);
    program::signal(program.pid(), SIGSTOP);
    program::wait_until("it is stopped", || program::is_stopped(program.pid()));
    let memory = dump(&criu, &program, &place.join("images"));
    program.kill();
    let (tree, _pagers) = restore(&criu, &place, "work", &memory, plain()).expect("restored");
    program::wait_until("it is stopped again", || program::is_stopped(tree.root));
    let child = process_tree(tree.root)[1];
    program::wait_until("its child runs", || !program::is_stopped(child));
    program::signal(tree.root, SIGCONT);
    assert_eq!(program.ask("add"), "1 1", "it and its child answer");
    program.adopt(tree.root);
}

/// What the images say of where pages are, together.
fn pagemap_bytes(images: &std::path::Path) -> u64 {
    let entries = fs::read_dir(images).expect("images").flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("pagemap-"))
        .map(|entry| entry.metadata().expect("its size").len())
        .sum()
}

#[test]
fn clones_live_beside_the_original_with_numbers_and_files_of_their_own() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("clones");
    let home = place.join("home");
    fs::create_dir(&home).expect("home");
    let program = Program::start(&home);
    assert_eq!(program.ask("add"), "1 1");
    let memory = dump(&criu, &program, &place.join("images"));
    let mut clones = Vec::new();
    for number in 0..2 {
        let copy = copy_files(&home, &place.join(&format!("copy{number}")));
        let shown = vec![Shown { copy: copy.clone(), path: home.clone() }];
        let options = RestoreOptions { shown, own_network: number == 1, ..own_numbers() };
        let work = format!("work{number}");
        let (mut tree, pagers) = restore(&criu, &place, &work, &memory, options).expect("a clone");
        let kept = Kept::of(&mut tree);
        assert_ne!(tree.root, program.pid());
        clones.push((copy, tree, kept, pagers));
    }
    assert_eq!(program.ask("add"), "2 2");
    for (copy, tree, ..) in &clones {
        assert_eq!(program.ask_in(copy, "add"), "2 2");
        assert_eq!(program.ask_in(copy, "add"), "3 3");
        assert_eq!(program.ask_in(copy, "pid"), program.pid().to_string(), "numbers as before");
        assert_eq!(process_tree(tree.root).len(), 3, "with its child and a zombie");
    }
    assert_eq!(program.ask("add"), "3 3", "the original knows nothing of them");
    // A clone of a clone.
    let (copy, tree, ..) = &clones[1];
    for hide_memory in [false, true] {
        let images = place.join(&format!("again{hide_memory}"));
        let other = copy_files(copy, &place.join(&format!("other{hide_memory}")));
        let helper = Some(own_numbers().helper);
        let options = DumpOptions { hide_memory, helper, ..DumpOptions::default() };
        let frozen = Dump::begin(&criu, tree.root, &images, &options).expect("frozen");
        let memory = Memory::of(&process_tree(tree.root));
        frozen.thaw().expect("a whole dump");
        let shown = vec![Shown { copy: other.clone(), path: home.clone() }];
        let mut restore = Restore::begin(
            &criu,
            &images,
            &place.join(&format!("again-work{hide_memory}")),
            RestoreOptions { shown, own_network: true, ..own_numbers() },
        )
        .expect("begun");
        let mut pagers = Vec::new();
        while let Some(arrival) = restore.next_arrival().expect("a process") {
            let pages = memory.pages_of_inner(arrival.old_pid);
            pagers.push(Pager::serve(arrival.userfaultfd, pages));
        }
        let mut again = restore.finish().expect("a clone of a clone");
        let _kept = Kept::of(&mut again);
        assert_eq!(program.ask_in(&other, "add"), "4 4");
        assert_eq!(program.ask_in(copy, "pid"), program.pid().to_string(), "beside its origin");
    }
    // One is killed from outside, one ends by itself.
    let (copy, tree, mut kept, _pagers) = clones.remove(0);
    kept.end();
    program::wait_until("the clone is gone", || process_tree(tree.root).is_empty());
    assert!(program.try_ask_in(&copy, "add").is_none());
    let (copy, _tree, mut kept, _pagers) = clones.remove(0);
    assert_eq!(program.ask_in(&copy, "exit"), "bye");
    let status = kept.0.wait(None).expect("a wait").expect("its end");
    assert_eq!(status.code(), Some(7), "the exit code of its root");
}

#[test]
fn a_restore_that_cannot_be_says_why_and_leaves_nothing() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("fails");
    let mut program = Program::start(&place.0);
    let memory = dump(&criu, &program, &place.join("images"));
    // Its number is taken: by itself.
    let error = restore(&criu, &place, "work1", &memory, plain()).expect_err("its number is taken");
    let RestoreError::Taken(taken) = &error else { panic!("{error}") };
    assert!(taken.contains(&(program.pid(), "python3".to_owned())), "{error}");
    assert_eq!(program.ask("add"), "1 1", "not harmed");
    program.kill();
    // A data file has another size: memory and file do not fit.
    let data = place.join("data");
    let old = fs::read(&data).expect("data");
    fs::write(&data, "short").expect("written");
    let error = restore(&criu, &place, "work2", &memory, plain()).expect_err("a data file changed");
    assert!(error.to_string().contains("not as large as it was"), "{error}");
    program::wait_until("nothing is left", || process_tree(program.pid()).is_empty());
    fs::write(&data, old).expect("written");
    // Given up in the middle.
    let mut restore_begun =
        Restore::begin(&criu, &place.join("images"), &place.join("work3"), plain()).expect("begun");
    let arrival = restore_begun.next_arrival().expect("no error").expect("a process");
    let all = process_tree(program.pid());
    drop(restore_begun);
    drop(arrival);
    let is_there = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    program::wait_until("all of it is gone", || !all.iter().any(is_there));
    // A log that has grown is fine.
    fs::write(place.join("log"), "more and more and more").expect("written");
    let (tree, _pagers) = restore(&criu, &place, "work4", &memory, plain()).expect("restored");
    assert_eq!(program.ask("add"), "1 1");
    program.adopt(tree.root);
}

#[test]
fn what_cannot_be_dumped_is_named_before_anything_is_frozen() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("refused");
    let program = Program::start(&place.0);
    assert_eq!(program.ask("device"), "ok");
    let error = Dump::begin(&criu, program.pid(), &place.join("images"), &DumpOptions::default())
        .expect_err("refused");
    let DumpError::Refused(refusals) = &error else { panic!("{error}") };
    assert_eq!(refusals[0].pid, program.pid());
    assert!(error.to_string().contains("/dev/loop-control"), "{error}");
    assert!(!place.join("images").exists());
    assert_eq!(program.ask("add"), "1 1");
}

#[test]
fn whatever_happens_to_criu_the_frozen_tree_runs_on() {
    let _one = ONE.lock();
    let Some(criu) = criu() else { return };
    let place = Place::new("killed");
    let program = Program::start(&place.0);
    let images = place.join("images");
    let options = DumpOptions { limit: Duration::from_secs(20), ..DumpOptions::default() };
    for (round, end) in ["drop", "abort", "kill", "abort"].into_iter().enumerate() {
        let frozen = Dump::begin(&criu, program.pid(), &images, &options).expect("frozen");
        assert!(program.is_traced());
        match end {
            "drop" => drop(frozen),
            "abort" => frozen.abort().expect("given up"),
            _ => {
                program::signal(program.tracer(), SIGKILL);
                frozen.thaw().expect_err("CRIU was killed");
            }
        }
        let count = format!("{0} {0}", round + 1);
        assert_eq!(program.ask("add"), count, "after {end}");
        assert!(!images.exists());
    }
}
