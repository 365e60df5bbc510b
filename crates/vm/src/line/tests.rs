//! Command lines as people write them, and what becomes of them.

use super::*;

const V7: Version = Version { major: 7, minor: 2 };

fn wish() -> Wish<'static> {
    Wish {
        name: Some("web1"),
        memory: Some(ByteSize(1 << 30)),
        version: V7,
        kvm_problem: None,
        default_machine: "pc",
        huge_pages: &[],
        here: Path::new("/home/me"),
    }
}

fn words(line: &str) -> Vec<OsString> {
    line.split(' ').filter(|word| !word.is_empty()).map(OsString::from).collect()
}

fn planned(line: &str, wish: &Wish<'_>) -> Plan {
    plan(&words(line), wish).unwrap_or_else(|refusal| panic!("{line}: {refusal}"))
}

/// The whole command line for a guest in /run/g, but without the agent's port, which each has.
fn line(line: &str, wish: &Wish<'_>) -> String {
    let words = Plan { agent: false, ..planned(line, wish) };
    let words = words.words(Path::new("/run/g")).expect("words");
    words.iter().map(|word| word.to_str().expect("text")).collect::<Vec<_>>().join(" ")
}

fn refused(line: &str, wish: &Wish<'_>) -> String {
    plan(&words(line), wish).expect_err(line).to_string()
}

const MONITOR: &str = "-chardev socket,id=strata-monitor,path=/run/g/monitor,server=on,wait=off \
                       -mon chardev=strata-monitor,mode=control";
const GENERATION: &str = "-device vmgenid,id=strata-generation,guid=auto";
const BALLOON: &str =
    "-device virtio-balloon-pci,id=strata-balloon,free-page-reporting=on,deflate-on-oom=on";

fn ram(bytes: u64) -> String {
    format!(
        "-object memory-backend-file,id=strata-ram,share=on,size={bytes},mem-path=/run/g/strata-ram"
    )
}

#[test]
fn a_plain_guest_gets_everything() {
    let given = "-nodefaults -display none -kernel k -append console=ttyS0";
    let expected = format!(
        "{given} {} {MONITOR} -name guest=web1 -m size=1024M -accel kvm -machine memory-backend=strata-ram {GENERATION} {BALLOON}",
        ram(1 << 30)
    );
    assert_eq!(line(given, &wish()), expected);
    let plan = planned(given, &wish());
    assert_eq!((plan.name.as_str(), plan.memory.0, plan.machine.as_str()), ("web1", 1 << 30, "pc"));
    assert_eq!((plan.accelerator.as_str(), plan.balloon.as_deref()), ("KVM", Some(BALLOON_ID)));
    assert_eq!((plan.notes.len(), plan.changed(Path::new("/run/g")).expect("none")), (0, vec![]));
}

#[test]
fn what_the_user_says_is_not_said_again() {
    let given = "-name web1 -m 1G,maxmem=4G,slots=2 -machine q35 -accel tcg";
    let expected = format!(
        "{given} {} {MONITOR} -machine memory-backend=strata-ram {GENERATION} {BALLOON}",
        ram(1 << 30)
    );
    let unsaid = Wish { name: None, memory: None, ..wish() };
    for wish in [wish(), unsaid] {
        assert_eq!(line(given, &wish), expected);
        let plan = planned(given, &wish);
        assert_eq!((plan.name.as_str(), plan.machine.as_str()), ("web1", "q35"));
        assert_eq!(plan.accelerator, "TCG, as the command line says");
    }
    for name in ["-name guest=web1,debug-threads=on", "--name web1"] {
        assert!(!line(name, &wish()).contains("guest=web1 "), "{name}");
    }
    // Without a name in it, QEMU merges the two.
    assert!(line("-name debug-threads=on", &wish()).contains("-name guest=web1"));
    assert!(line("-m slots=2,maxmem=4G", &wish()).contains("-m size=1024M"));
}

#[test]
fn memory_and_name_are_said_once_or_alike() {
    for memory in ["-m 1024", "-m 1G", "-m size=1048576k", "-m 1.0G", "-m 512 -m 1G"] {
        assert_eq!(planned(memory, &wish()).memory.0, 1 << 30, "{memory}");
    }
    for (given, why) in [
        ("-m 2G", "-m gives the guest 2.0 GiB, and --memory 1.0 GiB"),
        ("-m much", "-m much is not a size"),
        ("-name db", "-name calls the guest db, and --name web1"),
        ("-m", "-m has no value"),
    ] {
        assert!(refused(given, &wish()).starts_with(why), "{}", refused(given, &wish()));
    }
    assert!(refused("-m 1G", &Wish { name: None, ..wish() }).contains("no name; give --name"));
    assert!(refused("", &Wish { memory: None, ..wish() }).contains("no memory; give --memory"));
    let odd = Wish { memory: Some(ByteSize((1 << 30) + 1)), ..wish() };
    assert!(refused("", &odd).contains("so many MiB"));
    let none = Wish { memory: Some(ByteSize(0)), ..wish() };
    assert!(refused("", &none).contains("so many MiB"));
}

#[test]
fn the_balloon_fits_the_machine() {
    let microvm = line("-M microvm", &wish());
    assert!(microvm.ends_with("-device virtio-balloon-device,id=strata-balloon,free-page-reporting=on,deflate-on-oom=on"), "{microvm}");
    assert!(line("-machine type=q35", &wish()).ends_with(BALLOON));
    // Parts of one machine in several options.
    assert!(line("-machine q35 -machine nvdimm=on", &wish()).ends_with(BALLOON));
    let plan = planned("-machine isapc", &wish());
    assert!(plan.balloon.is_none() && plan.notes[0].contains("has no balloon"), "{plan:?}");
}

#[test]
fn a_pc_with_tables_has_a_generation_and_one_of_them() {
    for given in ["", "-machine q35", "-M pc-i440fx-7.2,acpi=on", "-machine acpi=on"] {
        assert!(line(given, &wish()).contains(GENERATION), "{given}");
    }
    for given in [
        "-M microvm",
        "-M isapc",
        "-machine virt",
        "-machine q35,acpi=off",
        "-no-acpi",
        "-device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87",
    ] {
        assert!(!line(given, &wish()).contains("strata-generation"), "{given}");
    }
}

#[test]
fn who_waits_for_a_migration_is_told_how_it_may_come() {
    let plan = planned("-machine q35 -incoming defer", &wish());
    assert!(plan.notes[0].contains("post-copy fails"), "{plan:?}");
    assert!(planned("-machine q35", &wish()).notes.is_empty());
}

#[test]
fn a_balloon_that_is_there_is_completed() {
    let given = "-device virtio-balloon-pci,bus=pci.0,addr=5 -device virtio-rng-pci";
    let completed = "-device driver=virtio-balloon-pci,bus=pci.0,addr=5,free-page-reporting=on,id=strata-balloon -device virtio-rng-pci";
    let done = line(given, &wish());
    assert!(done.starts_with(completed) && !done.ends_with(BALLOON), "{done}");
    let plan = planned(given, &wish());
    assert_eq!(plan.changed(Path::new("/run/g")).expect("text").len(), 1);
    let given = "-device virtio-balloon-pci,id=bal,free-page-reporting=off";
    let plan = planned(given, &wish());
    assert_eq!(plan.balloon.as_deref(), Some("bal"));
    assert!(plan.notes[0].contains("free-page-reporting=off"), "{plan:?}");
    assert!(line(given, &wish()).starts_with(given));
    let json = r#"-device {"driver":"virtio-balloon-pci","id":"b"}"#;
    let done = line(json, &wish());
    assert!(
        done.starts_with(
            r#"-device {"driver":"virtio-balloon-pci","free-page-reporting":true,"id":"b"}"#
        ),
        "{done}"
    );
}

#[test]
fn a_guest_has_a_port_for_an_agent_behind_all_else() {
    let words = |line: &str| planned(line, &wish()).words(Path::new("/run/g")).expect("words");
    let without = line("-machine q35", &wish());
    let with = words("-machine q35");
    let with = with.iter().map(|word| word.to_str().expect("text")).collect::<Vec<_>>().join(" ");
    let port = with.strip_prefix(&without).expect("behind all else");
    assert!(port.starts_with(" -chardev socket,id=strata-memory,path=/run/g/strata-memory,"));
    assert!(port.contains("name=org.strata.memory.0"), "{port}");
    assert!(!planned("-machine isapc", &wish()).agent);
}

#[test]
fn a_balloon_that_is_to_follow_the_guest_lets_go() {
    let followed = |line: &str| {
        let mut plan = planned(line, &wish());
        plan.balloon_by_itself()?;
        let words = plan.words(Path::new("/run/g")).expect("words");
        Ok(words.iter().map(|word| word.to_str().expect("text")).collect::<Vec<_>>().join(" "))
    };
    let line: Result<String, Refusal> = followed("-machine q35");
    let line = line.expect("it can");
    assert!(line.contains(BALLOON), "{line}");
    let line = followed("-device virtio-balloon,id=b").expect("it can");
    let completed = "-device driver=virtio-balloon,id=b,free-page-reporting=on,deflate-on-oom=on";
    assert!(line.starts_with(completed), "{line}");
    assert!(followed("-device virtio-balloon,deflate-on-oom=on").is_ok());
    for (given, why) in [
        ("-machine isapc", "it has none"),
        ("-device virtio-balloon,deflate-on-oom=off", "does not let go"),
    ] {
        assert!(followed(given).expect_err(given).why.contains(why), "{given}");
    }
}

#[test]
fn objects_of_the_guests_ram_become_files_of_ours() {
    let given =
        "-machine q35,memory-backend=m0 -object memory-backend-ram,id=m0,size=1G,prealloc=on";
    let done = line(given, &wish());
    let object = "-object qom-type=memory-backend-file,id=m0,size=1G,prealloc=on,share=on,mem-path=/run/g/m0";
    assert!(done.contains(object) && !done.contains("strata-ram"), "{done}");
    let given = "-object memory-backend-ram,id=a,size=512M -object memory-backend-ram,id=b,size=512M \
                 -numa node,memdev=a -numa node,memdev=b -numa dist,src=0,dst=1,val=40";
    let done = line(given, &wish());
    assert_eq!(done.matches("qom-type=memory-backend-file").count(), 2, "{done}");
    assert!(!done.contains("memory-backend=") && done.contains("mem-path=/run/g/b"), "{done}");
    assert_eq!(planned(given, &wish()).changed(Path::new("/run/g")).expect("text").len(), 2);
    let json = r#"-machine memory-backend=m -object {"qom-type":"memory-backend-ram","id":"m","size":1073741824}"#;
    let done = line(json, &wish());
    assert!(done.contains(r#""mem-path":"/run/g/m","qom-type":"memory-backend-file","share":true,"size":1073741824"#), "{done}");
}

#[test]
fn memory_that_is_not_the_guests_ram_stays_what_it_is() {
    let given = "-object memory-backend-file,id=nv,size=1G,mem-path=/srv/nv,share=on -device nvdimm,memdev=nv \
                 -object memory-backend-ram,id=vm0,size=1G -device virtio-mem-pci,memdev=vm0 \
                 -object memory-backend-memfd,id=x,size=1G,share=on -numa node,nodeid=1";
    assert!(line(given, &wish()).starts_with(given));
}

#[test]
fn ram_that_would_stay_shared_is_refused() {
    for (given, why) in [
        (
            "-machine memory-backend=m -object memory-backend-memfd,id=m,size=1G,share=on",
            "the object m (memory-backend-memfd), which would stay shared",
        ),
        (
            "-object memory-backend-file,id=m,size=1G,mem-path=/srv/x -numa node,memdev=m",
            "the object m (memory-backend-file)",
        ),
        ("-machine memory-backend=m", "no -object is called m"),
        ("-object memory-backend-ram,id=../m -machine memory-backend=../m", "which would stay"),
        ("-object memory-backend-ram,id=monitor -machine memory-backend=monitor", "which would"),
        ("-numa node,mem=1G", "divides the guest's memory without objects"),
    ] {
        let line = refused(given, &wish());
        assert!(line.contains(why), "{given}: {line}");
    }
}

#[test]
fn what_cannot_be_managed_is_refused() {
    let huge = [PathBuf::from("/dev/hugepages")];
    let wish = Wish { huge_pages: &huge, ..wish() };
    for (given, why) in [
        ("-device vhost-user-fs-pci,chardev=c,tag=x", "virtiofs"),
        ("--device vhost-user-blk-pci,chardev=c", "vhost-user"),
        ("-netdev vhost-user,id=n,chardev=c", "vhost-user"),
        ("-nic vhost-user,chardev=c", "vhost-user"),
        ("-device ivshmem-plain,memdev=m", "ivshmem"),
        ("-device vfio-pci,host=1", "VFIO"),
        ("-overcommit mem-lock=on", "locked"),
        ("-realtime mlock=on", "locked"),
        ("-object memory-backend-file,id=h,mem-path=/dev/hugepages,size=1G", "hugetlbfs"),
        ("-object sev-guest,id=s", "encrypted"),
        ("-readconfig vm.cfg", "-readconfig"),
        ("-mem-path /x", "-mem-path"),
        ("-nodefaults -S -device vfio-pci", "VFIO"),
        ("-some-new-option -device vfio-pci", "VFIO"),
        ("-M q35,confidential-guest-support=s", "encrypted"),
    ] {
        let line = refused(given, &wish);
        assert!(line.contains(why), "{given}: {line}");
    }
    let old = Wish { version: Version { major: 4, minor: 2 }, ..wish };
    assert!(refused("", &old).contains("QEMU 4.2, which is too old; use 5.1 or newer"));
}

#[test]
fn a_value_is_no_option() {
    let given = vec!["-append".into(), "-device".into(), "-serial".into(), "-".into()];
    let plan = plan(&given, &wish()).expect("a plan");
    assert_eq!(plan.words(Path::new("/run/g")).expect("words")[..4], given);
    // A path that is no text.
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let odd: Vec<OsString> = vec!["-kernel".into(), OsStr::from_bytes(b"/\xff").to_owned()];
    let plan = super::plan(&odd, &wish()).expect("a plan");
    assert_eq!(plan.words(Path::new("/run/g")).expect("words")[..2], odd);
    let odd: Vec<OsString> = vec!["-device".into(), OsStr::from_bytes(b"x\xff").to_owned()];
    assert!(super::plan(&odd, &wish()).expect_err("no text").why.contains("is no text"));
}

#[test]
fn the_accelerator_is_what_works_here() {
    let slow = Wish { kvm_problem: Some("there is none"), ..wish() };
    let plan = planned("", &slow);
    assert_eq!(plan.accelerator, "TCG, which is slow: there is none");
    assert!(line("", &slow).contains("-accel tcg,thread=multi,tb-size=64"));
    for (given, said) in [
        ("-enable-kvm", "KVM"),
        ("-accel kvm", "KVM"),
        ("-machine q35,accel=kvm:tcg", "KVM:TCG"),
        ("-accel tcg,tb-size=32", "TCG"),
    ] {
        let plan = planned(given, &slow);
        assert_eq!(plan.accelerator, format!("{said}, as the command line says"), "{given}");
        assert_eq!(plan.notes.len(), usize::from(said.starts_with("KVM")), "{given}");
        assert_eq!(line(given, &slow).matches("-accel").count(), given.matches("-accel").count());
        assert!(planned(given, &wish()).notes.is_empty(), "{given}");
    }
}

#[test]
fn paths_are_written_for_qemu_and_fit_a_socket() {
    let plan = planned("", &wish());
    let words = plan.words(Path::new("/run/a,b")).expect("words");
    let text: Vec<_> = words.iter().map(|word| word.to_str().expect("text")).collect();
    let text = text.join(" ");
    assert!(text.contains("mem-path=/run/a,,b/strata-ram"), "{text}");
    assert!(text.contains("path=/run/a,,b/monitor,"), "{text}");
    // The agent's port has the longest name.
    let longest = PathBuf::from(format!("/{}", "d".repeat(92)));
    assert!(plan.words(&longest).is_ok());
    let longer = PathBuf::from(format!("/{}", "d".repeat(93)));
    assert!(plan.words(&longer).expect_err("too long").todo.contains("shorter name"));
}

#[test]
fn any_words_are_planned_or_refused() {
    let pieces = [
        "-m",
        "-M",
        "-device",
        "-object",
        "1G",
        "q35",
        "-",
        "--",
        "",
        "-name",
        "a,b=c",
        ",",
        "virtio-balloon-pci",
        "memory-backend-ram,id=m,size=1G",
        "-machine",
        "memory-backend=m",
        "{",
        "{}",
        "-numa",
        "node,memdev=m",
        "-S",
        "-append",
        "-accel",
        "kvm",
    ];
    let mut state = 3_u64;
    for _ in 0..5000 {
        let mut words = Vec::new();
        for _ in 0..8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            words.push(OsString::from(pieces[(state >> 33) as usize % pieces.len()]));
        }
        if let Ok(plan) = plan(&words, &wish()) {
            let written = plan.words(Path::new("/run/g")).expect("words");
            // Nothing that the user wrote is lost.
            assert!(written.len() > words.len(), "{words:?}");
        }
    }
}
