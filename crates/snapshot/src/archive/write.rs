//! Writes a snapshot file, front to back, from pages in the order of their
//! addresses. At most about 45 MiB of memory, and eight bytes for 64 KiB of data.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use strata_units::PAGE_SIZE;
use zstd::bulk::Compressor;

use super::dedup::Dedup;
use super::directory::{Directory, is_plain};
use super::format::{
    BLOCK_EXTENTS, BLOCK_PAGES, BlockEntry, BlockHead, CHUNK_BYTES, Content, ENTRY_BYTES,
    EXTENT_BYTES, Extent, FOOTER_BYTES, Footer, HEAD_BYTES, Kind, MAX_PAGES, digest, encode_header,
    fill_value, sum,
};
use super::part::{PartFile, Sink};
use super::{FileInfo, MAX_DESCRIPTION_BYTES, MAX_FILES, MAX_PROCESSES, Page, ProcessInfo};

/// The fastest of zstd's that is denser than lz4; the pages may have been packed
/// by the store before, and all of them pass here.
const LEVEL: i32 = 1;
/// So much may wait in the page cache for the device; else gigabytes of it do,
/// and other programs' memory makes room for them.
const SYNC_EVERY_BYTES: u64 = 64 << 20;

/// Why a snapshot file was not written. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// There is something of that name.
    #[error("{path}: it exists; nothing was overwritten", path = .0.display())]
    Exists(PathBuf),
    /// The file system or the device failed.
    #[error("cannot write {path}", path = .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A file that was to go in could not be read.
    #[error("cannot read {name}, which belongs to the snapshot")]
    Source {
        /// Its name in the snapshot.
        name: String,
        /// What it said.
        source: io::Error,
    },
    /// The caller's pages, files or processes cannot be written like this.
    #[error("cannot write the snapshot: {0}")]
    Refused(String),
    /// An earlier call failed, and said why.
    #[error("writing the snapshot has failed before")]
    Failed,
}

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// Length of the file.
    pub file_bytes: u64,
    /// Pages of all processes.
    pub pages: u64,
    /// Pages that are one 32-bit value throughout: they take no room.
    pub filled_pages: u64,
    /// Distinct pages, the others.
    pub stored_pages: u64,
}

/// Writes one snapshot file. After an error nothing is left of it, and every
/// further call fails; dropped before [`Writer::finish`], too.
#[derive(Debug)]
pub struct Writer<S: Sink = PartFile> {
    /// None: it has failed.
    output: Option<Output<S>>,
    path: PathBuf,
    directory: Directory,
    /// Number of the last page of the last process.
    last: Option<u64>,
    extents: Vec<Extent>,
    dedup: Dedup,
    /// Pages that wait for their block to be full, and their sums.
    pending: Vec<u8>,
    pending_sums: Vec<u8>,
    written: Written,
}

impl Writer {
    /// Begins the file `path`, under a name with `.part` at its end; what a
    /// killed writer left there is removed.
    ///
    /// # Errors
    /// [`WriteError::Exists`], [`WriteError::Io`].
    pub fn create(path: &Path) -> Result<Self, WriteError> {
        let seed = random_seed().map_err(|source| failed_at(path, source))?;
        let file = PartFile::create(path).map_err(|source| failed_at(path, source))?;
        Self::to(file, path, seed)
    }
}

fn random_seed() -> io::Result<u64> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn failed_at(path: &Path, source: io::Error) -> WriteError {
    let path = path.to_owned();
    match source.kind() {
        // Without words of its own: it is about `path` itself.
        io::ErrorKind::AlreadyExists if source.get_ref().is_none() => WriteError::Exists(path),
        _ => WriteError::Io { path, source },
    }
}

fn too_many(what: &str, most: u64) -> WriteError {
    WriteError::Refused(format!("a snapshot has at most {most} {what}"))
}

impl<S: Sink> Writer<S> {
    /// Begins a file in `sink`, which `path` names in errors. `seed` is that of
    /// its checksums and should be random: whoever knows it can make pages whose
    /// checksums are equal.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn to(sink: S, path: &Path, seed: u64) -> Result<Self, WriteError> {
        let io = |source| failed_at(path, source);
        let compressor = Compressor::new(LEVEL).map_err(io)?;
        let mut output = Output {
            sink,
            seed,
            compressor,
            block: Vec::new(),
            table: Vec::new(),
            len: 0,
            synced: 0,
        };
        output.append(&encode_header(seed)).map_err(io)?;
        Ok(Self {
            output: Some(output),
            path: path.to_owned(),
            directory: Directory::default(),
            last: None,
            extents: Vec::new(),
            dedup: Dedup::default(),
            pending: Vec::with_capacity(BLOCK_PAGES * PAGE_SIZE),
            pending_sums: Vec::new(),
            written: Written { file_bytes: 0, pages: 0, filled_pages: 0, stored_pages: 0 },
        })
    }

    /// Does `step`; if it fails, the file goes.
    fn attempt<T>(
        &mut self,
        step: impl FnOnce(&mut Self, &mut Output<S>) -> Result<T, Trouble>,
    ) -> Result<T, WriteError> {
        let mut output = self.output.take().ok_or(WriteError::Failed)?;
        match step(self, &mut output) {
            Ok(done) => {
                self.output = Some(output);
                Ok(done)
            }
            Err(Trouble::Device(source)) => Err(failed_at(&self.path, source)),
            Err(Trouble::Caller(error)) => Err(error),
        }
    }

    /// Sets the description: anything, up to [`MAX_DESCRIPTION_BYTES`].
    ///
    /// # Errors
    /// [`WriteError::Refused`]: it is longer.
    pub fn description(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.attempt(|writer, _| {
            if bytes.len() > MAX_DESCRIPTION_BYTES {
                return Err(too_many("bytes of description", MAX_DESCRIPTION_BYTES as u64).into());
            }
            writer.directory.description = bytes.to_vec();
            Ok(())
        })
    }

    /// Adds a file, all that `from` has. Names are of letters, digits and
    /// `._-+@:=,` and begin with neither `.` nor `-`.
    ///
    /// # Errors
    /// [`WriteError::Source`]: `from` failed. [`WriteError::Refused`]: the name is
    /// not plain or there twice, or there are too many. [`WriteError::Io`].
    pub fn file(&mut self, name: &str, mut from: impl Read) -> Result<(), WriteError> {
        self.attempt(|writer, output| {
            let files = &mut writer.directory.files;
            if !is_plain(name) || files.iter().any(|file| file.name == name) {
                let why = format!("it may not have a file named {name:?}, or not twice");
                return Err(WriteError::Refused(why).into());
            }
            if files.len() == MAX_FILES {
                return Err(too_many("files", MAX_FILES as u64).into());
            }
            let owner = files.len() as u16;
            let mut size_bytes = 0;
            let mut chunk = Vec::with_capacity(CHUNK_BYTES);
            loop {
                chunk.clear();
                (&mut from)
                    .take(CHUNK_BYTES as u64)
                    .read_to_end(&mut chunk)
                    .map_err(|source| WriteError::Source { name: name.into(), source })?;
                if chunk.is_empty() {
                    break;
                }
                size_bytes += chunk.len() as u64;
                output.block(Kind::File, owner, 0, &[], &chunk)?;
                if chunk.len() < CHUNK_BYTES {
                    break;
                }
            }
            files.push(FileInfo { name: name.into(), size_bytes });
            Ok(())
        })
    }

    /// Begins a process; the pages that follow are its. `restart` is the address
    /// of its agent's restart record.
    ///
    /// # Errors
    /// [`WriteError::Refused`]: it is there already, or there are too many.
    /// [`WriteError::Io`].
    pub fn process(&mut self, pid: u32, restart: Option<u64>) -> Result<(), WriteError> {
        self.attempt(|writer, output| {
            writer.write_extents(output)?;
            let processes = &mut writer.directory.processes;
            if processes.iter().any(|process| process.pid == pid) {
                return Err(WriteError::Refused(format!("process {pid} is there twice")).into());
            }
            if processes.len() == MAX_PROCESSES {
                return Err(too_many("processes", MAX_PROCESSES as u64).into());
            }
            processes.push(ProcessInfo { pid, restart, pages: 0 });
            writer.last = None;
            Ok(())
        })
    }

    /// Adds the page at `address` of the process that was begun last, in order
    /// of the addresses.
    ///
    /// # Errors
    /// [`WriteError::Refused`]: not in order, or not the beginning of a page, or
    /// too many. [`WriteError::Io`].
    pub fn page(&mut self, address: u64, page: &Page) -> Result<(), WriteError> {
        self.attempt(|writer, output| writer.add_page(output, address, page))
    }

    fn add_page(
        &mut self,
        output: &mut Output<S>,
        address: u64,
        page: &Page,
    ) -> Result<(), Trouble> {
        let refused = |why: &str| Err(WriteError::Refused(format!("{why} at {address:#x}")).into());
        let number = address / PAGE_SIZE as u64;
        if !address.is_multiple_of(PAGE_SIZE as u64) {
            return refused("there is no beginning of a page");
        }
        if self.last.is_some_and(|last| last >= number) {
            return refused("its pages are not in order");
        }
        let Some(process) = self.directory.processes.last_mut() else {
            return refused("no process was begun before the page");
        };
        if self.written.pages == MAX_PAGES {
            return Err(too_many("pages", MAX_PAGES).into());
        }
        let content = match fill_value(page) {
            Some(value) => {
                self.written.filled_pages += 1;
                Content::Filled(value)
            }
            None => {
                let digest = digest(page, output.seed);
                // Below 2^32, as the pages are.
                let next = self.written.stored_pages as u32;
                match self.dedup.find_or_add(digest, next) {
                    Some(known) => Content::Stored(known),
                    None => {
                        self.pending.extend_from_slice(page);
                        self.pending_sums.extend_from_slice(&(digest as u64).to_le_bytes());
                        self.written.stored_pages += 1;
                        Content::Stored(next)
                    }
                }
            }
        };
        self.written.pages += 1;
        process.pages += 1;
        self.last = Some(number);
        let extent = Extent::of(number, content);
        if !self.extents.last_mut().is_some_and(|last| last.join(&extent)) {
            if self.extents.len() == BLOCK_EXTENTS {
                self.write_extents(output)?;
            }
            self.extents.push(extent);
        }
        if self.pending.len() == BLOCK_PAGES * PAGE_SIZE {
            self.write_pages(output)?;
        }
        Ok(())
    }

    fn write_pages(&mut self, output: &mut Output<S>) -> Result<(), Trouble> {
        let count = self.pending.len() / PAGE_SIZE;
        if count > 0 {
            output.block(Kind::Pages, 0, count as u32, &self.pending_sums, &self.pending)?;
        }
        self.pending.clear();
        self.pending_sums.clear();
        Ok(())
    }

    fn write_extents(&mut self, output: &mut Output<S>) -> Result<(), Trouble> {
        if !self.extents.is_empty() {
            let mut bytes = Vec::with_capacity(self.extents.len() * EXTENT_BYTES);
            bytes.extend(self.extents.iter().flat_map(Extent::encode));
            // At most MAX_PROCESSES, and there is one: it has pages.
            let owner = (self.directory.processes.len() - 1) as u16;
            output.block(Kind::Extents, owner, self.extents.len() as u32, &[], &bytes)?;
            self.extents.clear();
        }
        Ok(())
    }

    /// Completes the file and gives it its name; it then outlives a crash of the
    /// machine.
    ///
    /// # Errors
    /// [`WriteError::Exists`], [`WriteError::Io`].
    pub fn finish(mut self) -> Result<Written, WriteError> {
        self.attempt(|writer, output| {
            writer.write_extents(output)?;
            writer.write_pages(output)?;
            for chunk in writer.directory.encode().chunks(CHUNK_BYTES) {
                output.block(Kind::Directory, 0, 0, &[], chunk)?;
            }
            writer.written.file_bytes = output.end(writer.written.stored_pages)?;
            output.sink.publish()?;
            Ok(writer.written)
        })
    }
}

/// Inside a step, before the caller hears of it.
enum Trouble {
    Device(io::Error),
    Caller(WriteError),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Device(error)
    }
}

impl From<WriteError> for Trouble {
    fn from(error: WriteError) -> Self {
        Self::Caller(error)
    }
}

/// The file as far as it is written.
struct Output<S> {
    sink: S,
    seed: u64,
    compressor: Compressor<'static>,
    /// The block that is being made.
    block: Vec<u8>,
    /// The table of blocks, encoded.
    table: Vec<u8>,
    len: u64,
    /// Up to here it is on the device.
    synced: u64,
}

impl<S> std::fmt::Debug for Output<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<S: Sink> Output<S> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sink.write(bytes)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Packs `raw` and writes it as the next block.
    fn block(
        &mut self,
        kind: Kind,
        owner: u16,
        items: u32,
        page_sums: &[u8],
        raw: &[u8],
    ) -> io::Result<()> {
        let begin = HEAD_BYTES + page_sums.len();
        let mut block = std::mem::take(&mut self.block);
        block.clear();
        block.resize(begin + raw.len(), 0);
        block[HEAD_BYTES..begin].copy_from_slice(page_sums);
        // It finds no room when packing gains next to nothing. Extents stay raw, so
        // that a small file cannot make a reader's memory large.
        let packed = match kind {
            Kind::Extents => None,
            _ => {
                let room = &mut block[begin..begin + raw.len() - raw.len() / 16];
                self.compressor.compress_to_buffer(raw, room).ok().filter(|&len| len < raw.len())
            }
        };
        let stored = packed.unwrap_or(raw.len());
        block.truncate(begin + stored);
        if packed.is_none() {
            block[begin..].copy_from_slice(raw);
        }
        let number = (self.table.len() / ENTRY_BYTES) as u64;
        let number = u32::try_from(number).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let head = BlockHead {
            kind,
            owner,
            items,
            raw_bytes: raw.len() as u32,
            stored_bytes: stored as u32,
            number,
            stored_sum: sum(&block[begin..], self.seed),
        };
        block[..HEAD_BYTES].copy_from_slice(&head.encode(page_sums, self.seed));
        let entry = BlockEntry { len_bytes: block.len() as u32, kind, owner };
        self.table.extend(entry.encode());
        let appended = self.append(&block);
        self.block = block;
        appended?;
        if self.len - self.synced >= SYNC_EVERY_BYTES {
            self.sink.sync()?;
            self.synced = self.len;
        }
        Ok(())
    }

    /// Writes table and footer. Returns the file's length.
    fn end(&mut self, contents: u64) -> io::Result<u64> {
        let table = std::mem::take(&mut self.table);
        let footer = Footer {
            table_offset: self.len,
            blocks: (table.len() / ENTRY_BYTES) as u64,
            contents,
            table_sum: sum(&table, self.seed),
            len_bytes: self.len + (table.len() + FOOTER_BYTES) as u64,
        };
        self.append(&table)?;
        self.append(&footer.encode(self.seed))?;
        Ok(self.len)
    }
}
