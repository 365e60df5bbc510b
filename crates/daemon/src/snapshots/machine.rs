//! What a machine's processor can do: programs choose their instructions when
//! they start (the C library does for its own functions), and a snapshot keeps
//! the choice. On a processor that lacks one of them they die by SIGILL.

use std::fs;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// Missing instruction sets that a message names before it says "…".
const SHOWN: usize = 6;
/// Instruction sets of x86-64, as `/proc/cpuinfo` calls them: what programs use
/// only where it is there. What begins with one of `X86_FAMILIES` is one, too.
const X86_SETS: &str = "pni ssse3 sse4_1 sse4_2 sse4a cx16 popcnt lahf_lm movbe abm aes pclmulqdq vaes \
    vpclmulqdq gfni sha_ni sha512 sm3 sm4 avx avx2 avx_vnni avx_ifma fma fma4 xop tbm f16c \
    bmi1 bmi2 adx rdrand rdseed rdtscp rdpid fsgsbase xsave xsavec xgetbv1 clflushopt clwb \
    movdiri movdir64b rtm serialize waitpkg pku";
const X86_FAMILIES: [&str; 3] = ["avx512", "avx10", "amx_"];

/// The processor that a snapshot was taken on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// As Rust calls it: `x86_64`.
    architecture: String,
    /// In the kernel's words.
    instructions: Vec<String>,
}

impl Machine {
    /// This one; read once, because that takes long where there are many processors.
    pub(super) fn here() -> &'static Self {
        static HERE: OnceLock<Machine> = OnceLock::new();
        let read = || fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        HERE.get_or_init(|| Self::of(std::env::consts::ARCH, &read()))
    }

    /// `cpuinfo`: of which the first processor counts.
    fn of(architecture: &str, cpuinfo: &str) -> Self {
        let is_x86 = architecture == "x86_64";
        let key = if is_x86 { "flags" } else { "Features" };
        let words = cpuinfo.lines().find_map(|line| {
            let (name, words) = line.split_once(':')?;
            (name.trim_end() == key).then_some(words)
        });
        let counts = |word: &&str| {
            // Elsewhere all words are about instructions.
            !is_x86
                || X86_SETS.split(' ').any(|set| set == *word)
                || X86_FAMILIES.iter().any(|family| word.starts_with(family))
        };
        let words = words.unwrap_or_default().split_ascii_whitespace();
        let instructions = words.filter(counts).map(str::to_owned).collect();
        Self { architecture: architecture.to_owned(), instructions }
    }

    /// Why what ran there is not to be brought back `here`. `any_cpu`: somebody knows
    /// which instructions its programs use.
    pub(super) fn unfit_for(&self, here: &Self, any_cpu: bool) -> Option<String> {
        self.foreign_to(here).or_else(|| if any_cpu { None } else { self.richer_than(here) })
    }

    /// Why what ran there does not run `here`, whatever it uses.
    fn foreign_to(&self, here: &Self) -> Option<String> {
        (self.architecture != here.architecture).then(|| {
            format!(
                "it was taken on another architecture ({}, this is {})",
                self.architecture, here.architecture
            )
        })
    }

    /// Why what ran there may not run `here`.
    fn richer_than(&self, here: &Self) -> Option<String> {
        let lacks: Vec<&str> = self
            .instructions
            .iter()
            .filter(|set| !here.instructions.contains(set))
            .map(String::as_str)
            .collect();
        let dots = if lacks.len() > SHOWN { ", …" } else { "" };
        let shown = lacks[..lacks.len().min(SHOWN)].join(", ");
        (!lacks.is_empty()).then(|| {
            format!(
                "this machine's processor lacks instructions that its programs may use ({shown}{dots}); strata snapshot import --any-cpu takes it all the same"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RICH: &str = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512vl xsaves ibrs\n";
    const POOR: &str =
        "processor\t: 0\nflags\t\t: fpu sse2 avx2 svm\nprocessor\t: 1\nflags\t\t: avx512f\n";

    #[test]
    fn a_processor_that_lacks_instructions_is_told_from_one_that_does_not() {
        let (rich, poor) = (Machine::of("x86_64", RICH), Machine::of("x86_64", POOR));
        let why = rich.richer_than(&poor).expect("it is");
        assert!(why.contains("may use (avx512f, avx512vl); "), "{why}");
        assert_eq!(poor.richer_than(&rich), None);
        assert_eq!(rich.richer_than(&rich), None);
        assert_eq!(rich.unfit_for(&poor, false), Some(why));
        assert_eq!(rich.unfit_for(&poor, true), None);
    }

    #[test]
    fn another_architecture_is_named() {
        let arm = Machine::of("aarch64", "Features\t: fp asimd sve\n");
        assert_eq!(arm.instructions, ["fp", "asimd", "sve"]);
        for any_cpu in [false, true] {
            let why = arm.unfit_for(&Machine::of("x86_64", RICH), any_cpu).expect("it is");
            assert!(why.contains("aarch64") && why.contains("x86_64"), "{why}");
        }
    }

    #[test]
    fn this_machine_has_instructions() {
        assert!(!Machine::here().instructions.is_empty());
    }
}
