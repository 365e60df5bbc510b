use super::*;
use crate::testing::Fake;

/// In which a shell is ready, and which is waited for to be over.
const SHORT: Duration = Duration::from_secs(3);

struct Victim(std::process::Child);

impl Victim {
    fn new() -> Self {
        let mut command = std::process::Command::new("sleep");
        command.arg("100");
        // Ours may be led from outside of this pid namespace.
        strata_sys::own_session(&mut command);
        Self(command.spawn().expect("sleep"))
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const READY: &str = "eval \"printf '\\0' >&$status_fd\"; eval \"exec $status_fd>&-\"";
const WAIT: &str = "cat <&$ps_socket >/dev/null";
const IMAGE: &str = "printf '\\031\\103\\126\\124\\070\\061\\060\\126' >$images_dir/files.img";

type Begun = (Result<FrozenProcess, DumpError>, Victim, PathBuf);

fn begin(fake: &Fake, lines: &str) -> Begun {
    begin_within(fake, lines, DumpOptions::default().limit)
}

fn begin_within(fake: &Fake, lines: &str, limit: Duration) -> Begun {
    let victim = Victim::new();
    let images = fake.directory().join("images");
    let options = DumpOptions { limit, ..DumpOptions::default() };
    let result = Dump::begin(&fake.criu(lines), victim.0.id(), &images, &options);
    (result, victim, images)
}

#[test]
fn a_dump_is_ready_thawed_and_whole() {
    let fake = Fake::new("dump-whole");
    let (result, _victim, images) = begin(&fake, &format!("{IMAGE}; {READY}; {WAIT}"));
    let frozen = result.expect("ready");
    assert!(images.is_dir());
    frozen.thaw().expect("whole");
    assert!(images.join("files.img").is_file());
}

#[test]
fn a_dump_that_fails_says_why_and_leaves_nothing() {
    let fake = Fake::new("dump-fails");
    let text = "echo '(00.1) Error (criu/a.c:1): no such luck' >$images_dir/dump.log; exit 1";
    let (result, _victim, images) = begin(&fake, text);
    let error = result.expect_err("it failed");
    let DumpError::Failed { reason, .. } = &error else { panic!("{error:?}") };
    assert_eq!(reason.words, "no such luck", "{error}");
    assert!(!error.to_string().contains("luck"), "CRIU's own words: {error}");
    assert!(!images.exists());
    // Ready, and then it fails: the same.
    let (result, _victim, images) = begin(&fake, &format!("{READY}; {WAIT}; exit 1"));
    let error = result.expect("ready").thaw().expect_err("it failed");
    assert!(matches!(error, DumpError::Failed { .. }));
    assert!(!images.exists());
    // Images that are not as this version knows them are no dump.
    let (result, _victim, images) = begin(&fake, &format!("{READY}; {WAIT}"));
    let error = result.expect("ready").thaw().expect_err("no images");
    assert!(matches!(error, DumpError::System { .. }), "{error}");
    assert!(!images.exists());
}

#[test]
fn what_takes_too_long_is_ended() {
    let fake = Fake::new("dump-long");
    let (result, _victim, images) =
        begin_within(&fake, &WAIT.replace("cat", "exec cat"), SHORT / 10);
    let error = result.expect_err("never ready");
    assert!(matches!(error, DumpError::TooLong { running: true, .. }), "{error:?}");
    assert!(!images.exists());
    let (result, _victim, images) = begin_within(&fake, &format!("{READY}; exec sleep 100"), SHORT);
    let error = result.expect("ready").thaw().expect_err("never ends");
    assert!(error.to_string().contains("did not thaw process"), "{error}");
    assert!(!images.exists());
}

#[test]
fn given_up_or_dropped_it_leaves_no_images() {
    let fake = Fake::new("dump-dropped");
    for give_up in [true, false] {
        let (result, _victim, images) = begin(&fake, &format!("{IMAGE}; {READY}; {WAIT}"));
        let frozen = result.expect("ready");
        if give_up {
            frozen.abort().expect("given up");
        } else {
            drop(frozen);
        }
        assert!(!images.exists());
    }
}

/// What a CRIU does that fails with `words` until it is called for the time `good`.
fn fails_until(good: u32, words: &str) -> String {
    format!(
        "echo x >>$images_dir/../tries; [ $(wc -l <$images_dir/../tries) -ge {good} ] || {{ \
         echo '(0) Error (a.c:1): {words}' >$images_dir/dump.log; exit 1; }}; \
         {IMAGE}; {READY}; {WAIT}"
    )
}

fn tries(fake: &Fake) -> usize {
    let tries = fs::read_to_string(fake.directory().join("tries")).expect("tries");
    tries.lines().count()
}

#[test]
fn a_connection_made_meanwhile_is_tried_again() {
    let fake = Fake::new("dump-again");
    let text = fails_until(3, "unix: External socket is used.");
    let (result, _victim, _images) = begin(&fake, &text);
    let frozen = result.expect("the third time");
    assert_eq!(frozen.late(), None);
    frozen.thaw().expect("whole");
    assert_eq!(tries(&fake), 3);
}

#[test]
fn a_thread_that_does_not_stop_in_time_is_told_to_once_more() {
    let words = "Unseizable non-zombie 7 found, state R, err -1/4";
    let fake = Fake::new("dump-unstopped");
    let (result, _victim, _images) = begin(&fake, &fails_until(2, words));
    let frozen = result.expect("the second time");
    assert_eq!(frozen.late(), Some(words));
    frozen.thaw().expect("whole");
    let fake = Fake::new("dump-never-stopped");
    let (result, _victim, images) = begin(&fake, &fails_until(3, words));
    let error = result.expect_err("it never stops");
    assert!(error.to_string().contains("did not stop in time"), "{error}");
    assert_eq!(tries(&fake), 2);
    assert!(!images.exists());
}

#[test]
fn a_slow_failure_tells_what_the_thread_did() {
    let fake = Fake::new("dump-slow");
    let text = "for o do [ \"$p\" != --tree ] || tree=$o; p=$o; done; sleep 1.3; \
                echo \"(0) Error (a.c:1): Unseizable non-zombie $tree found\" \
                >$images_dir/dump.log; exit 1";
    let victim = Victim::new();
    let images = fake.directory().join("images");
    let result = Dump::begin(&fake.criu(text), victim.0.id(), &images, &DumpOptions::default());
    let error = result.expect_err("it fails").to_string();
    assert!(error.contains(" (sleep), in state S on processor "), "{error}");
}
