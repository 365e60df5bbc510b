//! The target `reading` for libFuzzer; see `strata_fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| strata_fuzz::reading(data));
