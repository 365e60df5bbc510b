//! Scripts that stand for CRIU in tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::criu::Criu;

/// A directory with scripts, removed with it.
#[derive(Debug)]
pub(crate) struct Fake {
    directory: PathBuf,
    made: AtomicU32,
}

impl Fake {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("strata-snapshot-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).expect("a directory");
        Self { directory, made: AtomicU32::new(0) }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// A program that runs these lines of bash (sh knows no descriptors from 10 on).
    pub(crate) fn program(&self, lines: &str) -> PathBuf {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("criu-{number}"));
        fs::write(&path, format!("#!/usr/bin/env bash\n{lines}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    /// A CRIU that runs these lines when it is asked for anything but its
    /// version.
    pub(crate) fn criu(&self, lines: &str) -> Criu {
        let version = "[ \"$1\" != --version ] || { echo Version: 4.2; exit; }\n";
        // Its options by name, as $ps_socket, $status_fd, $images_dir, $work_dir.
        let options = "for o do case $p in --*) n=$(echo ${p#--} | tr - _); \
                       case $n in ps_socket|status_fd|images_dir|work_dir) eval \"$n=\\$o\";; esac;; esac; p=$o; done\n";
        let program = self.program(&format!("{version}{options}{lines}"));
        Criu::find(Some(&program)).expect("it says a version")
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}
