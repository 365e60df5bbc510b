//! Tests of domains.

use super::*;
use crate::networks::{CloneNetworks, NetworkWish, Networks};

const WISH: DomainWish<'_> = DomainWish {
    library: "/usr/lib/strata/libstrata.so",
    memory_directory: "/var/lib/libvirt/qemu/ram",
    agent_socket: None,
    monitor_directory: "/var/lib/libvirt/qemu",
};

/// As `virsh dumpxml --inactive` prints one, shortened.
const DUMPED: &str = "<domain type='qemu'>
  <name>web1</name>
  <uuid>6a1d4d5e-7bb2-4dc7-8ad4-1e2b7b1a3c5d</uuid>
  <!-- of the web team -->
  <memory unit='KiB'>327680</memory>
  <currentMemory unit='KiB'>327680</currentMemory>
  <vcpu placement='static'>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
  </os>
  <features>
    <acpi/>
  </features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <memballoon model='virtio'>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </memballoon>
  </devices>
</domain>
";

const AMENDED: &str = "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web1</name>
  <uuid>6a1d4d5e-7bb2-4dc7-8ad4-1e2b7b1a3c5d</uuid>
  <genid/>
  <!-- of the web team -->
  <memory unit='KiB'>327680</memory>
  <currentMemory unit='KiB'>327680</currentMemory>
  <memoryBacking>
    <source type='anonymous'/>
    <access mode='shared'/>
  </memoryBacking>
  <vcpu placement='static'>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
  </os>
  <features>
    <acpi/>
    <tcg>
      <tb-cache unit='MiB'>64</tb-cache>
    </tcg>
  </features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <memballoon model='virtio' autodeflate='on' freePageReporting='on'>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
      <stats period='2'/>
    </memballoon>
    <channel type='unix'>
      <target type='virtio' name='org.strata.memory.0'/>
    </channel>
  </devices>
  <qemu:commandline>
    <qemu:env name='LD_PRELOAD' value='/usr/lib/strata/libstrata.so'/>
    <qemu:env name='STRATA_GUEST_DIR' value='/var/lib/libvirt/qemu/ram'/>
    <qemu:arg value='-chardev'/>
    <qemu:arg value='socket,id=strata-monitor,path=/var/lib/libvirt/qemu/6a1d4d5e-7bb2-4dc7-8ad4-1e2b7b1a3c5d.strata,server=on,wait=off'/>
    <qemu:arg value='-mon'/>
    <qemu:arg value='chardev=strata-monitor,mode=control'/>
  </qemu:commandline>
</domain>
";

fn amended(text: &str) -> Domain {
    amend(text, &WISH).unwrap_or_else(|refusals| panic!("{refusals:?} of {text}"))
}

/// The devices of a domain of one's own.
fn with_devices(devices: &str) -> String {
    DUMPED.replace("<devices>\n", &format!("<devices>\n    {devices}\n"))
}

#[test]
fn a_domain_is_changed_where_it_must_be_and_once() {
    let domain = amended(DUMPED);
    assert_eq!(domain.text, AMENDED);
    assert_eq!((domain.name.as_str(), domain.kind.as_str()), ("web1", "qemu"));
    assert_eq!(domain.memory, Some(ByteSize(320 << 20)));
    assert_eq!(domain.emulator.as_deref(), Some("/usr/bin/qemu-system-x86_64"));
    assert_eq!((domain.owner, domain.notes.len()), (None, 0));
    assert_eq!(amended(AMENDED).text, AMENDED);
    // As libvirt writes it again.
    let again = AMENDED
        .replace("model='virtio' autodeflate='on' free", "model='virtio' free")
        .replace("Reporting='on'", "Reporting='on' autodeflate='on'")
        .replace("<tb-cache unit='MiB'>64<", "<tb-cache unit='KiB'>65536<");
    assert_eq!(amended(&again).text, again);
}

#[test]
fn what_a_domain_has_of_its_own_stays() {
    let own = DUMPED
        .replace("type='qemu'>", "type='kvm' xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>")
        .replace(
            "  <vcpu",
            "  <memoryBacking><nosharepages/><access mode=\"private\"/></memoryBacking>\n  <vcpu",
        )
        .replace("model='virtio'>", "model='none'/>")
        .replace("      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>\n    </memballoon>\n", "")
        .replace(
            "</domain>",
            "  <q:commandline>\n    <q:arg value='-msg'/>\n    <q:arg value='timestamp=on'/>\n    \
             <q:env name='LD_PRELOAD' value='/opt/x.so /opt/old/libstrata.so'/>\n  \
             </q:commandline>\n  <seclabel type='static' model='dac' relabel='yes'>\n    \
             <label>vms:kvm</label>\n  </seclabel>\n</domain>",
        );
    let wish = DomainWish { agent_socket: Some("/run/x/agent.sock"), ..WISH };
    let domain = amend(&own, &wish).expect("a guest");
    for line in [
        "<memoryBacking><nosharepages/><access mode=\"shared\"/>\n    <source type='anonymous'/>\n  </memoryBacking>",
        "<memballoon model='virtio' autodeflate='on' freePageReporting='on'>\n      <stats period='2'/>\n    </memballoon>",
        "<q:arg value='timestamp=on'/>",
        "<q:env name='LD_PRELOAD' value='/opt/x.so:/usr/lib/strata/libstrata.so'/>\n    \
         <q:env name='STRATA_GUEST_DIR' value='/var/lib/libvirt/qemu/ram'/>\n    \
         <q:env name='STRATA_AGENT_SOCKET' value='/run/x/agent.sock'/>\n    <q:arg value='-chardev'/>",
        "<q:arg value='chardev=strata-monitor,mode=control'/>\n  </q:commandline>",
    ] {
        assert!(domain.text.contains(line), "{line} is not in {}", domain.text);
    }
    // Bounded code buffers are for emulated guests.
    assert!(!domain.text.contains("tb-cache") && !domain.text.contains("xmlns:qemu"));
    assert_eq!(domain.owner.as_deref(), Some("vms:kvm"));
    assert_eq!(amend(&domain.text, &wish).expect("a guest").text, domain.text);
}

#[test]
fn what_is_missing_altogether_is_made() {
    let bare = "<domain type=\"qemu\"><name>x</name><memory unit='GiB'>1</memory>\
                <os><type>hvm</type></os><devices/></domain>";
    let domain = amended(bare);
    assert_eq!(domain.memory, Some(ByteSize(1 << 30)));
    for part in [
        "<tb-cache unit='MiB'>64</tb-cache>",
        "mode='shared'",
        "<memballoon model",
        "org.strata.memory.0",
        "LD_PRE",
    ] {
        assert!(domain.text.contains(part), "{part} is not in {}", domain.text);
    }
    assert_eq!(amended(&domain.text).text, domain.text);
    let all_at_once = DUMPED.replace(
        "  <vcpu",
        "  <memoryBacking>\n    <allocation mode='immediate'/>\n  </memoryBacking>\n  <vcpu",
    );
    assert_eq!(amended(&all_at_once).notes.len(), 1);
}

#[test]
fn what_cannot_be_a_tenant_is_refused_by_name() {
    let backing = |inner: &str| {
        let new = format!("<memoryBacking>{inner}</memoryBacking>\n  <vcpu");
        DUMPED.replace("<vcpu", &new)
    };
    let argument = |words: &[&str]| {
        let words: String = words.iter().map(|w| format!("<qemu:arg value='{w}'/>")).collect();
        AMENDED.replace("<qemu:commandline>", &format!("<qemu:commandline>{words}"))
    };
    for (text, what, why) in [
        (backing("<hugepages/>"), "memoryBacking hugepages", "hugetlbfs"),
        (backing("<locked/>"), "memoryBacking locked", "locked"),
        (with_devices("<interface type='vhostuser'/>"), "interface vhostuser", "another process"),
        (with_devices("<interface type='hostdev'/>"), "interface hostdev", "pinned"),
        (with_devices("<interface type='vdpa'/>"), "interface vdpa", "pinned"),
        (with_devices("<disk type='vhostuser'/>"), "disk vhostuser", "another process"),
        (with_devices("<hostdev mode='subsystem' type='pci'/>"), "hostdev pci", "pinned"),
        (with_devices("<hostdev mode='subsystem' type='mdev'/>"), "hostdev mdev", "pinned"),
        (
            with_devices("<filesystem type='mount'><driver type='virtiofs'/></filesystem>"),
            "filesystem virtiofs",
            "another process",
        ),
        (with_devices("<video><driver name='vhostuser'/></video>"), "video vhostuser", "another"),
        (with_devices("<shmem name='s'/>"), "shmem", "shared with other"),
        (DUMPED.replace("<os>", "<launchSecurity type='sev'/><os>"), "launchSecurity", "encrypted"),
        (DUMPED.replace("'qemu'", "'xen'"), "of the type \"xen\"", "QEMU's guests"),
        (argument(&["-device", "vhost-user-blk-pci,chardev=c"]), "qemu:arg", "vhost-user"),
        (argument(&["-overcommit", "mem-lock=on"]), "qemu:arg", "locked"),
        ("<network><name>x</name></network>".to_owned(), "no domain", ""),
        ("<domain".to_owned(), "cannot be read", ""),
        ("<!DOCTYPE d [<!ENTITY a 'b'>]><domain/>".to_owned(), "cannot be read", "DTD"),
        ("<domain type='kvm'/>".to_owned(), "no devices", ""),
    ] {
        let refusals = amend(&text, &WISH).expect_err(what);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        let line = refusals[0].to_string();
        assert!(line.contains(what) && line.contains(why), "{what}: {line}");
    }
    let several = with_devices("<shmem/><hostdev type='pci'/><hostdev type='pci'/>");
    assert_eq!(amend(&several, &WISH).expect_err("two").len(), 2);
    for fine in [
        "<hostdev mode='subsystem' type='usb'/>",
        "<filesystem type='mount'><driver type='path'/></filesystem>",
        "<interface type='network'><driver name='vhost'/></interface>",
        "<memory model='nvdimm'/>",
    ] {
        amended(&with_devices(fine));
    }
}

#[test]
fn libraries_that_are_there_stay() {
    let with = |preload| with_library(preload, "/l/libstrata.so");
    assert_eq!(with(""), "/l/libstrata.so");
    assert_eq!(with("/a.so b.so"), "/l/libstrata.so:/a.so:b.so");
    assert_eq!(with("/a.so:/old/libstrata.so"), "/a.so:/l/libstrata.so");
}

/// Devices that a second guest of the kind would have as well.
const DEVICES: &str = "<disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='/images/a.img' index='1'/>
      <backingStore/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <source file='/images/cd.iso'/>
      <readonly/>
    </disk>
    <interface type='network'>
      <mac address='52:54:00:00:00:01'/>
      <source network='default'/>
      <target dev='vnet3'/>
      <model type='virtio'/>
    </interface>
    <serial type='pty'>
      <source path='/dev/pts/3'/>
      <log file='/var/log/a.log'/>
    </serial>
    <channel type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/channel/1-web1/org.qemu.guest_agent.0'/>
    </channel>
    <graphics type='vnc' port='5900' autoport='no'/>";

fn other(text: &str, clone: bool) -> Result<WaitingDomain, Vec<Refusal>> {
    let own = CloneNetworks { id: [1, 2, 3, 4], wish: NetworkWish::SameKind };
    other_on(text, clone.then_some(own))
}

fn other_on(text: &str, clone: Option<CloneNetworks<'_>>) -> Result<WaitingDomain, Vec<Refusal>> {
    let disk = crate::again::OtherDisk {
        said: "/images/a.img".into(),
        path: "/images/a.img.test".into(),
        format: "qcow2".into(),
        layers: Vec::new(),
    };
    let wish = OtherDomain {
        clone: clone.map(|_| "test"),
        uuid: "11111111-2222-3333-4444-555555555555",
        monitor_directory: "/m",
        tenant: ("/run/agent.sock", "00ff"),
        disks: &[disk],
        networks: clone.map_or(Networks::Back { beside: false }, Networks::Clone),
    };
    other_domain(text, &wish)
}

#[test]
fn a_clone_has_what_two_can_have_and_its_own_identity() {
    let first = amended(&with_devices(DEVICES)).text;
    let made = other(&first, true).expect("a clone");
    assert_eq!(
        (made.name.as_str(), made.emulator.as_str()),
        ("test", "/usr/bin/qemu-system-x86_64")
    );
    for part in [
        "<name>test</name>\n  <uuid>11111111-2222-3333-4444-555555555555</uuid>",
        "<genid>11111111-2222-3333-4444-555555555555</genid>",
        "<driver name='qemu' type='qcow2'/>\n      <source file='/images/a.img.test' index='1'/>\n      <target",
        "<source file='/images/cd.iso'/>",
        "<interface type='ethernet'>\n      <mac address='02:01:02:03:04:00'/>\n      <model type='virtio'/>\n      <target dev='st01020304-0'/>\n    </interface>",
        "path='/run/libvirt/qemu/channel/1-web1/org",
        "<channel type='unix'>\n      <target type='virtio' name='org.strata.memory.0'/>",
        "<log file='/var/log/a.log.test'/>",
        "<graphics type='vnc' port='-1' autoport='yes'/>",
        "path=/m/11111111-2222-3333-4444-555555555555.strata,server=on",
        "<qemu:arg value='-incoming'/>\n    <qemu:arg value='defer'/>",
        "<qemu:env name='STRATA_AGENT_SOCKET' value='/run/agent.sock'/>",
        "<qemu:env name='STRATA_TOKEN' value='00ff'/>",
    ] {
        assert!(made.text.contains(part), "{part} is not in {}", made.text);
    }
    assert_eq!(made.notes.len(), 2, "{:?}", made.notes);
    let serial = "<serial type='unix'><source mode='bind' path='/s'/></serial>";
    let served = amended(&with_devices(serial)).text;
    assert_eq!(other(&served, true).expect("a clone").consoles, ["/s.test"]);
    assert_eq!(other(&served, false).expect("the same").consoles, ["/s"]);
    // What runs by now can be cloned likewise.
    let again = other(&made.text.replace("a.img.test", "a.img"), true).expect("a clone of it");
    assert_eq!(again.text.matches("-incoming").count(), 1);
    assert_eq!(again.text.matches("STRATA_TOKEN").count(), 1);
}

#[test]
fn a_clone_of_libvirts_has_the_network_that_is_wished() {
    let id = [1, 2, 3, 4];
    let user = amended(&with_devices("<interface type='user'><model type='virtio'/></interface>"));
    let tap = CloneNetworks { id, wish: NetworkWish::Tap };
    let made = other_on(&user.text, Some(tap)).expect("a clone");
    assert_eq!((made.taps.len(), made.notes.len()), (1, 0));
    assert!(made.text.contains("<interface type='ethernet'>"), "{}", made.text);
    assert!(made.text.contains("<mac address='02:01:02:03:04:00'/>"), "{}", made.text);
    assert!(made.text.contains("<qemu:arg value='user,id=strata-apart-0,restrict=on'/>"));
    let bridged = amended(&with_devices(DEVICES)).text;
    let own = |forwards| CloneNetworks { id, wish: NetworkWish::User(forwards) };
    assert!(other_on(&user.text, Some(own(&[]))).expect("a clone").taps.is_empty());
    for (text, clone, why) in [
        (&user.text, own(&[(7001, 22)]), "no ports that lead to it"),
        (&bridged, own(&[]), "user networking lacks"),
        (&amended(&with_devices("")).text, tap, "no network"),
    ] {
        let refusals = other_on(text, Some(clone)).expect_err(why);
        assert!(refusals[0].why.contains(why), "{refusals:?}");
    }
}

#[test]
fn what_takes_the_first_ones_place_has_all_that_it_had() {
    let devices = format!("{DEVICES}<hostdev mode='subsystem' type='usb'/>");
    let first = amended(&with_devices(&devices)).text;
    let made = other(&first, false).expect("the same one");
    assert_eq!((made.name.as_str(), made.notes.len()), ("web1", 0));
    for part in ["<source network='default'/>", "port='5900'", "6a1d4d5e", "a.img.test", "usb"] {
        assert!(made.text.contains(part), "{part} is not in {}", made.text);
    }
}

#[test]
fn what_is_one_guests_is_refused_by_name_for_a_clone() {
    for (device, named, restored) in [
        ("<hostdev mode='subsystem' type='usb'/>", "hostdev", true),
        ("<tpm model='tpm-tis'/>", "tpm", false),
        ("<serial type='tcp'/>", "tcp", true),
        ("<vsock model='virtio'/>", "vsock", true),
        ("<interface type='mcast'/>", "mcast", true),
        ("<graphics type='vnc' socket='/x'/>", "display", true),
        ("<disk type='block' device='disk'><source dev='/dev/sda'/></disk>", "disk", false),
    ] {
        let text = amended(&with_devices(device)).text;
        let refusals = other(&text, true).expect_err(device);
        assert!(refusals.len() == 1 && refusals[0].why.contains(named), "{refusals:?}");
        assert_eq!(other(&text, false).is_ok(), restored, "{device}");
    }
    let without = other(DUMPED, true).expect_err("no monitor");
    assert!(without[0].why.contains("monitor"), "{without:?}");
}
