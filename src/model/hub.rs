//! Models by their name on the Hugging Face hub, where the feature `hub` is built in.

use std::path::PathBuf;

use anyhow::Result;

/// `org/name` or `org/name:file.gguf`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reference {
    /// `org/name`
    pub repository: String,
    /// A file of it; without it, the repository must hold one GGUF file.
    pub file: Option<String>,
}

impl Reference {
    /// `None` for what cannot be such a name, as a path that does not exist.
    pub fn parse(text: &str) -> Option<Self> {
        let (repository, file) = match text.split_once(':') {
            Some((repository, file)) => (repository, Some(file)),
            None => (text, None),
        };
        let (organisation, name) = repository.split_once('/')?;
        let sound = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        // The file may be in a folder of the repository; a path that climbs out of it is no file.
        let sound_file = file.is_none_or(|file| file.split('/').all(sound));
        (sound(organisation) && sound(name) && sound_file)
            .then(|| Self { repository: repository.into(), file: file.map(str::to_owned) })
    }
}

/// Fetches the file into the hub's own cache, or says why it is not possible.
#[cfg(not(feature = "hub"))]
pub(super) fn fetch(reference: &Reference) -> Result<PathBuf> {
    let Reference { repository, .. } = reference;
    anyhow::bail!(
        "{repository:?} is not a file or folder here, and this build cannot fetch it by name: \
         build with `--features hub`, or download its GGUF file and name its path"
    )
}

/// Fetches the file into the hub's own cache, which other programs of the user share. Where the hub
/// is, and with which token it is asked, is the user's setting (`HF_ENDPOINT`, `HF_HOME`).
#[cfg(feature = "hub")]
pub(super) fn fetch(reference: &Reference) -> Result<PathBuf> {
    use anyhow::Context as _;
    use std::io::IsTerminal as _;

    let Reference { repository, file } = reference;
    let about = || {
        format!(
            "while fetching {repository:?}, which is no file or folder here, from the hub \
             (offline, download its GGUF file elsewhere and name its path)"
        )
    };
    let api = hf_hub::api::sync::ApiBuilder::from_env()
        .with_progress(std::io::stderr().is_terminal())
        .build()
        .with_context(about)?;
    let remote = api.model(repository.clone());
    let file = match file {
        Some(file) => file.clone(),
        None => {
            let listed = remote.info().with_context(about)?.siblings;
            let names = listed.into_iter().map(|sibling| sibling.rfilename);
            the_one_of(repository, names.filter(|name| name.ends_with(".gguf")).collect())?
        }
    };
    remote.get(&file).with_context(about)
}

#[cfg(feature = "hub")]
fn the_one_of(repository: &str, mut files: Vec<String>) -> Result<String> {
    match files.len() {
        1 => {
            let file = files.remove(0);
            // The list is the hub's word; it goes into a path of the cache.
            let sound = Reference::parse(&format!("{repository}:{file}")).is_some();
            anyhow::ensure!(sound, "{repository:?} lists a file of the unsound name {file:?}");
            Ok(file)
        }
        0 => anyhow::bail!("{repository:?} holds no GGUF file; name a repository that does"),
        count => {
            files.truncate(20);
            let names = files.join(", ");
            anyhow::bail!("{repository:?} holds {count} GGUF files, add one as `:FILE`: {names}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_the_hub_are_told_from_paths() {
        let shown: Vec<String> = [
            "org/name",
            "org/name:q4.gguf",
            "org/name:sub/q4.gguf",
            "org/name:../q4.gguf",
            "name",
            "./org/name",
            "/org/name",
            "a/b/c",
            "org/",
            "../name",
            "org/name:",
        ]
        .iter()
        .map(|text| format!("{text} -> {:?}", Reference::parse(text)))
        .collect();
        insta::assert_snapshot!(shown.join("\n"));
    }
}
