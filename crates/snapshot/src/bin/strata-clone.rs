//! Starts a clone; Strata runs it, people do not (see the library's `clone`).
#![forbid(unsafe_code)]

fn main() {
    std::process::exit(strata_snapshot::clone::main(std::env::args_os().skip(1)));
}
